"""Policy names -> caches: SGLang's own strategies, its session-aware cache, GDSF, and our plug-in's policies.

`NAME@N` is a policy with at most N runs in flight, `NAME@best` with the number that suits it best (found by a sweep
in the closed loop), `NAME@auto` with the number that core.admission finds while it serves. `belady` is no cache but
a bound (belady.py), at a fixed order of calls only.
"""

from dataclasses import dataclass, replace
from typing import Any, Literal

from pbkv_ray.config import POLICIES
from pbkv_ray.errors import ConfigError
from pbkv_ray.replay.tree import TreeOptions

STOCK = ("lru", "lfu", "slru", "tlru", "gdsf", "session")
BOUND = "belady"
TLRU_THRESHOLD_TOKENS = 1_024  # new tokens that T-LRU's latency budget allows a prompt
TLRU_NEXT_TOKENS = 256  # new tokens that the next prompt of a conversation is expected to bring
KNOWN = (*STOCK, *(name for name in POLICIES if name not in STOCK), BOUND)


@dataclass(frozen=True, slots=True)
class Choice:
    """A policy as asked for on the command line. `limit`: runs in flight, None: no limit of its own."""

    name: str
    policy: str
    limit: int | Literal["best", "auto"] | None = None


def parse_policies(text: str) -> list[Choice]:
    """ "lru,lru@best,pbkv+@8" -> choices. Raises ConfigError for a name that is not known."""
    choices = []
    for name in filter(None, (part.strip() for part in text.split(","))):
        policy, _, limit = name.partition("@")
        if policy not in KNOWN:
            raise ConfigError(f"policy {policy!r} is unknown; known are {', '.join(KNOWN)}, each also with @best or @N")
        if limit in ("best", "auto"):
            choices.append(Choice(name, policy, "best" if limit == "best" else "auto"))
        elif limit and not (limit.isdigit() and int(limit) > 0):
            raise ConfigError(f"the limit in {name!r} must be a number above zero, `best` or `auto`")
        else:
            choices.append(Choice(name, policy, int(limit) if limit else None))
    if not choices:
        raise ConfigError("no policy was named; give for instance --policies lru,session,pbkv+,belady")
    return choices


def stock_options(policy: str, base: TreeOptions, unit_tokens: int) -> TreeOptions:
    """Options of a policy that needs nothing of ours (GDSF is attached by `attach_gdsf` afterwards)."""
    if policy == "lru":
        return base
    if policy in ("lfu", "slru"):
        return replace(base, eviction_policy=policy)
    if policy == "tlru":  # with SGLang's own defaults (no budget) it is LRU
        config = {
            "threshold": TLRU_THRESHOLD_TOKENS // unit_tokens,
            "next_prompt_estimate": TLRU_NEXT_TOKENS // unit_tokens,
        }
        return replace(base, eviction_policy=policy, eviction_config=config)
    if policy == "session":
        return replace(base, session_aware=True, tree_core="python")
    if policy == "gdsf":
        return replace(base, tree_core="python")
    raise ConfigError(f"policy {policy!r} is not one of SGLang's own: {', '.join(STOCK)}")


class Gdsf:
    """Greedy-Dual-Size-Frequency as an SGLang eviction strategy: H = age + uses x miss cost / size.

    The miss cost of a node is its tokens times what a token costs at its depth; divided by the size, H is the uses
    times that cost, from the age at the node's last use. Age is the highest H evicted so far.
    """

    def __init__(self, depth_cost: float = 1e-5) -> None:
        self.age = 0.0
        self._depth_cost = depth_cost  # per token of depth, relative to a token at depth zero
        self._kept: dict[int, tuple[int, float]] = {}
        self._asked: list[tuple[float, Any]] = []

    def get_priority(self, node: Any) -> tuple[float, int]:
        seen = node.last_access_time
        known = self._kept.get(node.id)
        if known is None or known[0] != seen:
            known = (seen, self.age + max(1, node.hit_count) * (1.0 + self._depth_cost * _depth(node)))
            self._kept[node.id] = known
        self._asked.append((known[1], node))
        return known[1], seen

    def after_eviction(self) -> None:
        gone = [(value, node) for value, node in self._asked if node.evicted or node.parent is None]
        for value, node in gone:
            self.age = max(self.age, value)
            self._kept.pop(node.id, None)
        self._asked.clear()


def _depth(node: Any) -> int:
    depth, at = 0, node.parent
    while at is not None and at.key is not None:
        depth += len(at.key)
        at = at.parent
    return depth


def attach_gdsf(cache: Any) -> None:
    """Make GDSF the strategy of a cache with the Python tree core."""
    strategy, evict = Gdsf(), cache._evict
    cache.tree_core.eviction_strategy = strategy

    def evict_then_age(*args: Any, **kwargs: Any) -> Any:
        try:
            return evict(*args, **kwargs)
        finally:
            strategy.after_eviction()

    cache._evict = evict_then_age

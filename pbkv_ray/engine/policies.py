"""One switch, `EngineOptions.policy`: what each name asks of SGLang, and what of our radix backend.

The options travel as SGLang's own `radix_eviction_policy_config`, so every rank of every scheduler gets them.
"""

from dataclasses import asdict, dataclass
from typing import Any

from pbkv_ray.config import POLICIES, SHADOWS
from pbkv_ray.errors import ConfigError

STOCK = frozenset({"lru", "session"})  # SGLang as it is: no owners, no hints, no facts
BACKEND = "pbkv"  # our name in SGLang's radix-cache and tree-core registries

# policy: (switches on). What it scores by is in core.scores.score_of.
_BEYOND = frozenset({"pbkv+", "oracle"})  # what is not of the paper: partial eviction, siblings held back
_PREFETCH = frozenset({"kvflow", "pbkv", "pbkv+", "oracle"})


@dataclass(frozen=True, slots=True)
class RadixOptions:
    """What the scheduler's side needs to know.

    partial_tokens: of a leaf at least twice as long only a tail of at least so many tokens is freed; 0: whole leaves.
    prefetch: load host nodes on pure-decode batches; aggressive_share: how much of the pool it may take from active
              nodes to do so (paper, appendix E: rho), 0 = never.
    max_age_s: a forecast older than this, on the broadcast clock, is void.
    hold_siblings: requests that share a cold prefix wait until the first of them has computed it (`engine.queue`).
    shadow: "watch" estimates what LRU would have hit; "guard" also lets LRU take over from a policy that loses
            against it (`engine.oversight`); "off": neither.
    facts: zmq endpoint of a `facts.FactsReceiver`; empty: nothing is reported. hidden_states: also two vectors a call.
    """

    policy: str = "lae"
    partial_tokens: int = 0
    prefetch: bool = False
    aggressive_share: float = 0.0
    max_age_s: float = 600.0
    rescore_s: float = 0.0
    facts: str = ""
    hidden_states: bool = False
    hold_siblings: bool = False
    shadow: str = "off"

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            raise ConfigError(f"policy {self.policy!r} is unknown; known are {', '.join(POLICIES)}")
        if self.shadow not in SHADOWS:
            raise ConfigError(f"shadow {self.shadow!r} is unknown; known are {', '.join(SHADOWS)}")
        if self.partial_tokens < 0 or self.max_age_s <= 0 or not 0 <= self.aggressive_share < 1:
            raise ConfigError(
                f"partial_tokens {self.partial_tokens} must not be negative, max_age_s {self.max_age_s:g} must be "
                f"above zero, aggressive_share {self.aggressive_share:g} within [0, 1)"
            )

    @classmethod
    def of(cls, policy: str, **switches: Any) -> "RadixOptions":
        """The policy as its authors describe it; `switches` change single options."""
        usual: dict[str, Any] = {
            "partial_tokens": 256 if policy in _BEYOND else 0,
            "prefetch": policy in _PREFETCH,
            "hold_siblings": policy in _BEYOND,
        }
        return cls(policy=policy, **(usual | switches))


def policy_arguments(policy: str, **switches: Any) -> dict[str, Any]:
    """Arguments of `sglang.Engine` that select `policy`. `lru` and `session` are SGLang as it is.

    Raises ConfigError for a policy that does not exist, or switches that it cannot have.
    """
    options = RadixOptions.of(policy, **switches)
    if policy == "lru":
        return {}
    if policy == "session":
        return {"enable_session_radix_cache": True}
    arguments: dict[str, Any] = {
        "radix_cache_backend": BACKEND,
        "radix_eviction_policy_config": asdict(options),
    }
    if options.hidden_states:
        arguments["return_hidden_states_mode"] = "last"
    return arguments

"""How often what a prompt holds is used again, counted for one workflow; `core.ghost` says what is observed.

Rates by depth class and agent lean on the workflow's, those on everybody's, those on a prior. What the very next call
reads is learned once more by the call before it and by the last two: contexts that alternate, and conversations in
which one agent's prompt is the next one's, follow such patterns.
"""

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Mapping, Sequence

import numpy as np

from pbkv_ray.core.rates import BACK, DEPTHS, KINDS, OLDER, SHARED, STALE, STAY, Array, Rates

_PRIOR = np.array([0.9, 0.8, 0.1, 0.1, 0.98])
_CROSS_PRIOR = 0.02
_TRUST = 4.0  # observations that the coarser estimate is worth
_MEMORY = 256.0  # observations after which older ones fade
_MAX_AFTER = 4_096  # per workflow, of what was left and of what is handed over: the patterns seen lately
_MAX_NEXT = 32_768  # per workflow: rates of the next call that are kept until they are made anew
_NOTHING = (0.0, 0.0)
MAX_AGENTS = 64  # per workflow; later ones share the last column

Call = tuple[str, str]  # an agent, and whose prompt its call went on with (core.ghost)
After = tuple[Hashable, ...]  # what was read, the agent that is called, the calls before it


class ReuseCounts:
    """Observations of one workflow: weights and used shares. `total` [2, KINDS, C] is everybody's."""

    def __init__(self, total: Array) -> None:
        self._total = total
        self._agents: dict[str, int] = {}
        self._kind: Array = np.zeros((2, KINDS, len(DEPTHS), 4))  # [weight | used, kind, class, agent]
        self._cross: Array = np.zeros((2, 2, 4, 4))  # [weight | used, private | shared, from, to]
        self._after: OrderedDict[After, tuple[float, float]] = OrderedDict()  # -> seen, used; seen longest ago first
        self._handed: OrderedDict[After, tuple[float, float]] = OrderedDict()
        self._rates: tuple[Array, Array] | None = None
        self._next: dict[tuple[tuple[str, ...], tuple[str, ...], tuple[Call, ...]], tuple[Array, Array]] = {}
        self._seen = self._seen_at_rates = 0

    def seen(self) -> None:
        """One more call was observed."""
        self._seen += 1

    def column(self, agent: str) -> int:
        known = self._agents.get(agent)
        if known is None:
            known = min(len(self._agents), MAX_AGENTS - 1)
            if len(self._agents) < MAX_AGENTS - 1:
                self._agents[agent] = known
            if known >= self._kind.shape[-1]:
                more = self._kind.shape[-1]
                self._kind = np.pad(self._kind, [(0, 0)] * 3 + [(0, more)])
                self._cross = np.pad(self._cross, [(0, 0), (0, 0), (0, more), (0, more)])
            self._rates = None
        return known

    def count(self, kind: int, agent: int, shares: Iterable[tuple[int, float]]) -> None:
        """`shares`: (depth class, used share) of what was a candidate in that class."""
        for depth, used in shares:
            _add(self._kind[:, kind, depth, agent], used)
            _add(self._total[:, kind, depth], used)

    def count_cross(self, shared: int, source: int, to: int, used: float) -> None:
        _add(self._cross[:, shared, source, to], used)

    def count_after(self, what: tuple[str, ...], trail: tuple[Call, ...], used: float) -> None:
        """`what`: ("latest" or "older", agent) or ("handed", reader, agent); `trail`: the calls before, oldest
        first, of which two count."""
        table = self._handed if what[0] == "handed" else self._after
        # In a fixed order, unlike a set's: every rank keeps the same ones.
        for key in dict.fromkeys(((*what, *trail[-1:]), (*what, *trail[-2:]))):
            seen, sum_used = table.get(key, _NOTHING)
            fade = 0.5 if seen > _MEMORY else 1.0
            table[key] = (fade * seen + 1.0, fade * sum_used + used)
            table.move_to_end(key)
            if len(table) > _MAX_AFTER:
                table.popitem(last=False)

    def rates(self, agents: Sequence[str], path: tuple[str, ...], trail: tuple[Call, ...] = ()) -> Rates:
        """One column for each of `agents`; `path`: who called last, `trail`: the last two calls."""
        # Rates move little once much was seen: look again after 3 % more observations.
        if self._rates is None or self._seen > self._seen_at_rates + self._seen_at_rates // 32:
            self._rates = self._estimate()
            self._next.clear()
            self._seen_at_rates = self._seen
        kind, cross = self._rates
        width = kind.shape[-1] - 1  # the last column is what unknown agents get
        columns = np.array([min(self._agents.get(agent, MAX_AGENTS - 1), width) for agent in agents], np.intp)
        kind, cross = kind[:, :, columns], cross[:, columns[:, None], columns[None, :]]
        key = tuple(agents), path[-1:], trail
        known = self._next.get(key)
        if known is None:
            if (len(self._next) + 1) * len(agents) ** 2 > _MAX_NEXT:
                self._next.clear()
            known = self._next[key] = self._following(agents, path[-1:], trail, kind, cross[0])
        return Rates(kind, cross, *known)

    def _following(
        self, agents: Sequence[str], path: tuple[str, ...], trail: tuple[Call, ...], kind: Array, handed: Array
    ) -> tuple[Array, Array]:
        """`Rates.next` and `Rates.handed`."""
        own = np.stack((np.where([(agent,) == path for agent in agents], kind[STAY], kind[BACK]), kind[OLDER]))
        for known in (trail[-1:], trail)[: len(trail)]:
            keys: Sequence[After] = [("latest", b, *known) for b in agents] + [("older", b, *known) for b in agents]
            own = _leaning(_counted(self._after, keys).reshape(2, 1, len(agents), 2), own)
            keys = [("handed", a, b, *known) for a in agents for b in agents]
            handed = _leaning(_counted(self._handed, keys).reshape(len(agents), len(agents), 2), handed)
        return own, handed

    def _estimate(self) -> tuple[Array, Array]:
        """[KINDS, C, A + 1], [2, A + 1, A + 1]; the last column and row are for agents not seen yet."""
        # Coarsest first: all depths of all workflows, one depth of them, the workflow's depth, the agent's depth.
        every = self._total
        rate = (every[1].sum(1, keepdims=True) + _TRUST * _PRIOR[:, None]) / (every[0].sum(1, keepdims=True) + _TRUST)
        rate = (every[1] + _TRUST * rate) / (every[0] + _TRUST)
        mine = self._kind.sum(-1)
        rate = (mine[1] + _TRUST * rate) / (mine[0] + _TRUST)
        padded = np.pad(self._kind, [(0, 0)] * 3 + [(0, 1)])
        whole = padded.sum(2, keepdims=True)  # the agent at any depth
        agent = (whole[1] + _TRUST * rate[..., None]) / (whole[0] + _TRUST)
        kind = (padded[1] + _TRUST * agent) / (padded[0] + _TRUST)
        kind = np.minimum.accumulate(kind, axis=1)  # deeper is never more likely: child <= parent
        kind = np.maximum(kind, kind[STALE])
        kind[SHARED] = kind.max(0)

        # No leaning on other pairs: credit for a first use that was never seen is harmful (data/statistics.md, 3b).
        pairs = np.pad(self._cross, [(0, 0), (0, 0), (0, 1), (0, 1)])
        cross = (pairs[1] + _TRUST * _CROSS_PRIOR) / (pairs[0] + _TRUST)
        cross[1] = np.maximum(cross[1], cross[0])
        return kind, cross


def _add(table: Array, used: float) -> None:
    """One observation to [weight, used]."""
    if table[0] > _MEMORY:
        table *= 0.5
    table[0] += 1.0
    table[1] += used


def _counted(table: Mapping[After, tuple[float, float]], keys: Sequence[After]) -> Array:
    """[keys, (weight, used)]"""
    return np.array([table.get(key, _NOTHING) for key in keys])


def _leaning(seen: Array, coarser: Array) -> Array:
    """seen [..., (weight, used)]: what was counted, with the coarser rate where little was."""
    return np.asarray((seen[..., 1] + _TRUST * coarser) / (seen[..., 0] + _TRUST))

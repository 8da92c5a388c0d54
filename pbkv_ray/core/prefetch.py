"""Conservative prefetch (paper section 4.3): what to load from host to device while a batch only decodes.

The shell asks `plan` before a pure-decode batch, performs the loads, and reports what became of them; this file
decides and counts. Space: free + retired device tokens, so no active node ever goes for a prefetch. Bandwidth: what
the link moves during one decode step, both measured, so decoding is not slowed. Candidates: by one-step Value
(paper Eq. 1), because what is needed two steps ahead can be loaded one step later. A node without its ancestors is
useless, so a load is a path: its longest prefix that fits.

The aggressive variant (paper appendix E) also displaces up to `aggressive` of the pool's active tokens; off.
"""

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

from pbkv_ray.core.reuse import ReuseIndex, Tier
from pbkv_ray.errors import ConfigError

N = TypeVar("N", bound=Hashable)


@dataclass(frozen=True, slots=True)
class PrefetchOptions:
    """`aggressive` is the paper's rho. `burst_steps`: unused bandwidth is kept for so many decode steps, or a node
    longer than one step's worth could never be loaded; 1 is the paper's budget."""

    aggressive: float = 0.0
    least_value: float = 0.05  # expected uses by the next calls; below it a transfer is not worth it
    burst_steps: float = 32.0
    first_tokens: int = 256  # budget until a transfer and a decode step have been measured
    smoothing: float = 0.1  # weight of the newest measurement
    max_candidates: int = 256  # nodes looked at per plan
    max_tracked: int = 65_536  # prefetched nodes whose fate is not known yet

    def __post_init__(self) -> None:
        if not 0 <= self.aggressive < 1:
            raise ConfigError(f"aggressive is {self.aggressive}; it is a share of the pool, in [0, 1)")
        if not 0 < self.smoothing <= 1 or self.burst_steps < 1 or self.first_tokens < 1:
            raise ConfigError("smoothing must be in (0, 1], burst_steps and first_tokens at least 1")


@dataclass(frozen=True, slots=True)
class Load(Generic[N]):
    """Load `path` (first ancestor first), whose last node is `node`: `tokens` in all."""

    node: N
    path: tuple[N, ...]
    tokens: int
    value: float


@dataclass(slots=True)
class PrefetchCount:
    """In tokens. planned = loading + waiting for use + useful + late + wasted + cancelled + failed."""

    planned: int = 0
    useful: int = 0  # used after they had arrived
    late: int = 0  # asked for while they were on the way
    wasted: int = 0  # left the device unused
    cancelled: int = 0  # the run moved elsewhere before the transfer began
    failed: int = 0  # the engine could not load them
    forgotten: int = 0  # counted as wasted, because too many were tracked


@dataclass(slots=True)
class _Flight:
    tokens: int
    here: bool = False


class Prefetcher(Generic[N]):
    """One engine's prefetch. Single-threaded; every report of an unknown node is a no-op."""

    def __init__(self, index: ReuseIndex[N], options: PrefetchOptions | None = None) -> None:
        self.options = options or PrefetchOptions()
        self.count = PrefetchCount()
        self._index = index
        self._flights: OrderedDict[N, _Flight] = OrderedDict()
        self._tokens_per_s: float | None = None
        self._step_s: float | None = None
        self._credit = 0.0
        self._loading = 0  # tokens on the way

    # Measurements

    def decoded(self, seconds: float) -> None:
        """A pure-decode step took so long."""
        self._step_s = self._average(self._step_s, seconds)

    def transferred(self, tokens: int, seconds: float) -> None:
        """The link moved so many tokens from host to device in so long."""
        if tokens > 0 and seconds > 0:
            self._tokens_per_s = self._average(self._tokens_per_s, tokens / seconds)

    def _average(self, old: float | None, new: float) -> float:
        return new if old is None else old + self.options.smoothing * (new - old)

    def step_tokens(self) -> float:
        """S_bw: tokens that one decode step hides."""
        if self._tokens_per_s is None or self._step_s is None:
            return float(self.options.first_tokens)
        return self._tokens_per_s * self._step_s

    # Decisions

    def plan(self, free_tokens: int, pool_tokens: int) -> list[Load[N]]:
        """Loads to start with the pure-decode batch that is about to run, best first; once per such batch.

        free_tokens: device tokens nobody holds. pool_tokens: size of the device pool.
        """
        space = free_tokens + self._index.retired_tokens(Tier.DEVICE) - self._loading
        space += int(self.options.aggressive * pool_tokens)
        self.nothing()
        left = min(space, int(self._credit))
        loads: list[Load[N]] = []
        planned: set[N] = set()
        for looked, (value, node) in enumerate(self._index.host_only()):
            if left <= 0 or value < self.options.least_value or looked >= self.options.max_candidates:
                break
            load = self._fit(node, value, left, planned)
            if load is not None:
                planned.update(load.path)
                left -= load.tokens
                loads.append(load)
        for load in loads:
            self._credit -= load.tokens
            self.count.planned += load.tokens
        return loads

    def nothing(self) -> None:
        """`plan` where nothing is known to be on the host alone: the step's bandwidth is saved up."""
        step = self.step_tokens()
        self._credit = min(self._credit + step, self.options.burst_steps * step)

    def _fit(self, node: N, value: float, left: int, planned: set[N]) -> Load[N] | None:
        path: list[tuple[N, int]] = []
        tokens = 0
        for ancestor, size in self._index.load_path(node):
            if ancestor in planned:
                continue
            flight = self._flights.get(ancestor)
            if flight is not None and not flight.here:
                return None  # on the way already: what hangs below it waits for it
            if tokens + size > left:
                break
            path.append((ancestor, size))
            tokens += size
        if not path:
            return None
        for ancestor, size in path:
            self._track(ancestor, size)
        return Load(path[-1][0], tuple(ancestor for ancestor, _ in path), tokens, value)

    def _track(self, node: N, tokens: int) -> None:
        self.left(node)  # here once before, and gone without a word
        self._flights[node] = _Flight(tokens)
        self._loading += tokens
        while len(self._flights) > self.options.max_tracked:
            flight = self._take(next(iter(self._flights)))
            self.count.forgotten += flight.tokens
            self.count.wasted += flight.tokens

    def _take(self, node: N) -> _Flight:
        """Stops following the node; an empty flight if it was not followed."""
        flight = self._flights.pop(node, None) or _Flight(0, here=True)
        if not flight.here:
            self._loading -= flight.tokens
        return flight

    def to_cancel(self, loads: list[Load[N]]) -> list[Load[N]]:
        """Of loads that have not begun: those whose run has moved elsewhere since. Report them with `cancelled`."""
        return [load for load in loads if self._index.next_call(load.node) < self.options.least_value]

    # What became of it

    def arrived(self, node: N) -> None:
        """The node's transfer is complete."""
        flight = self._flights.get(node)
        if flight is not None and not flight.here:
            flight.here = True
            self._loading -= flight.tokens

    def cancelled(self, load: Load[N]) -> None:
        self.count.cancelled += sum(self._take(node).tokens for node in load.path)

    def failed(self, load: Load[N]) -> None:
        """The engine could not load it (no slot, too short, node gone)."""
        self.count.failed += sum(self._take(node).tokens for node in load.path)

    def used(self, node: N) -> None:
        """A call's prompt contains the node: once per node of the matched path."""
        flight = self._take(node)
        if flight.here:
            self.count.useful += flight.tokens
        else:
            self.count.late += flight.tokens

    def left(self, node: N) -> None:
        """The node has left the device (or the tree)."""
        self.count.wasted += self._take(node).tokens

    def clear(self) -> None:
        """The cache was emptied: whatever waited for its use has left."""
        for node in list(self._flights):
            self.left(node)

    def check_invariants(self) -> None:
        count = self.count
        tracked = sum(flight.tokens for flight in self._flights.values())
        known = tracked + count.useful + count.late + count.wasted + count.cancelled + count.failed
        assert count.planned == known, f"{count.planned} tokens planned, the fate of {known} known"
        loading = sum(flight.tokens for flight in self._flights.values() if not flight.here)
        assert self._loading == loading, f"{self._loading} tokens on the way counted, {loading} found"
        assert len(self._flights) <= self.options.max_tracked

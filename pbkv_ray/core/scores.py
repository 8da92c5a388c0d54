"""How much an owner set is worth: every policy's arithmetic, vectorised, without any knowledge of the tree.

A score is a product of two arrays, so that it can move with the clock at no cost per node:

    share(use)  = sum over k of weights[use, k] * discounts[run of use, k]
    Score(node) = sum (or maximum) of share over the node's active owners

`weights` is made once per forecast of a run (and once per new kind of use); `discounts` once per tick for all runs.
A *use* says how one run knows a node: which of its agents have ever read it (`ever`), which of them read it in
their latest prompt (`fresh`) or in the one that they left for it (`older`: contexts that alternate), whether other
runs know it too (`shared`), and how deep it starts (`depth`, a class).

Every score here keeps the child <= parent property: a child's use is contained in its parent's, weights grow with
`ever`, `fresh`, `older` and `shared`, fall with depth, and discounts do not depend on the node.
"""

from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

from pbkv_ray.core.forecast import Array
from pbkv_ray.core.rates import Rates
from pbkv_ray.core.waits import at_elapsed
from pbkv_ray.errors import ConfigError

Bools = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]

_QUEUED_S = 0.25  # a call that has just joined the engine's queue is expected to be served so soon
_SOONEST_S = 0.02  # nothing is expected sooner than a few decode steps from now


@dataclass(frozen=True, slots=True, eq=False)
class Uses:
    """R ways in which one run knows nodes. Columns are the run's agents (its bits), B of them."""

    ever: Bools  # [R, B] the agent has read the node (paper: A_w(c))
    fresh: Bools  # [R, B] the agent's latest prompt contains the node; implies `ever`
    older: Bools  # [R, B] the prompt that the agent left for its latest contains the node; implies `ever`
    shared: Bools  # [R] another run has read it too, or foreign traffic has
    depth: Ints  # [R] class of the node's first token, see ghost.depth_class


@dataclass(frozen=True, slots=True, eq=False)
class Outlook:
    """What is expected of one run, in columns of its agents (B). K is the forecast's own horizon.

    agent: [K, B] P(call k + 1 is made by the agent | the run has not ended before it)
    end:   [K]    P(the run ends instead of call k + 1 | it has not ended before)
    current: the agent that called last, if any
    rates: learned reuse of this run's agents
    """

    agent: Array
    end: Array
    current: int | None
    rates: Rates


@dataclass(frozen=True, slots=True, eq=False)
class Clock:
    """What the discounts of n runs depend on besides `now_s`. Seconds on the broadcast clock.

    called_s: [n] when the run's latest call began.
    since_s:  [n] since when the part of its wait lasts that is running now: the answer, or what comes after it.
    curve:    [n, C] of that part: expected 1 / remaining at the elapsed times `waits.ELAPSED_S`, in 1/s.
    after_s:  [n] what comes after that part; 0 when it is the last one.
    mean_s:   [n] the mean of the whole wait, in seconds.
    start_s:  [n, K] when call k + 1 is expected to start, not falling with k.
    waiting_s: [n] since when a call of the run is queued in the engine; call 1 is that one. Infinite: none is.
    """

    called_s: Array
    since_s: Array
    curve: Array
    after_s: Array
    mean_s: Array
    start_s: Array
    waiting_s: Array | None = None


class Score(Protocol):
    """One policy's arithmetic. `retired_first`: nodes whose runs have all ended go before everything else."""

    name: str
    horizon: int
    retired_first: bool
    timed: bool  # discounts move with the clock
    learns: bool  # weights use learned reuse; then depth classes are kept apart
    combine: Literal["sum", "max"]

    def weights(self, run: Outlook, uses: Uses) -> Array:
        """[R, horizon], not negative. Column 0 is what the next call alone is worth (paper Eq. 1)."""

    def discounts(self, now_s: float, clock: Clock) -> Array:
        """[n, horizon], not negative, falling with k."""


def _steps(run: Outlook, horizon: int) -> tuple[Array, Array]:
    """Agent [horizon, B] and end [horizon]; steps that the forecast does not have are certain ends."""
    have = min(horizon, len(run.end))
    agent = np.zeros((horizon, run.agent.shape[1]))
    end = np.ones(horizon)
    agent[:have], end[:have] = run.agent[:have], run.end[:have]
    return agent, end


class RecencyScore:
    """LRU: nobody is worth anything, recency decides. With `retired_first` this is the paper's LAE."""

    horizon = 1
    timed = False
    learns = False
    combine: Literal["sum", "max"] = "sum"

    def __init__(self, name: str = "lru", retired_first: bool = False) -> None:
        self.name = name
        self.retired_first = retired_first

    def weights(self, run: Outlook, uses: Uses) -> Array:
        return np.zeros((len(uses.shared), 1))

    def discounts(self, now_s: float, clock: Clock) -> Array:
        return np.zeros((len(clock.called_s), 1))


class PaperScore:
    """Paper Eq. 2: sum over k of gamma^(k-1) s^(k) A . P^(k); past access counts as future use."""

    name = "paper"
    retired_first = True
    timed = False
    learns = False
    combine: Literal["sum", "max"] = "sum"

    def __init__(self, horizon: int = 3, gamma: float = 0.7) -> None:
        if horizon < 1 or not 0 < gamma <= 1:
            raise ConfigError(f"horizon {horizon}, gamma {gamma}: the paper's score needs >= 1 and in (0, 1]")
        self.horizon = horizon
        self._discount = gamma ** np.arange(horizon)

    def weights(self, run: Outlook, uses: Uses) -> Array:
        agent, end = _steps(run, self.horizon)
        alive = np.concatenate(([1.0], np.cumprod(1.0 - end[:-1])))
        return np.asarray(uses.ever @ (agent * alive[:, None]).T)

    def discounts(self, now_s: float, clock: Clock) -> Array:
        return np.broadcast_to(self._discount, (len(clock.called_s), self.horizon))


class TimeScore:
    """First passage over time: sum over k of F_k x E[1 / seconds until call k], given how long the run is silent.

    F_k is the probability that call k is the first one that uses the node: the call is made by an agent that then
    really uses it (learned reuse), and no call before did. The wait's conditional distribution is learned and
    heavy-tailed: the expected inverse falls as a run becomes overdue. An estimate of one over the time to the next
    use, which is what Belady's optimum sorts by.
    """

    name = "time"
    retired_first = True
    timed = True
    combine: Literal["sum", "max"] = "sum"

    def __init__(self, horizon: int = 10, learns: bool = True, punctual: bool = False) -> None:
        """`punctual`: calls start exactly when the forecast says (an oracle's do); else waits are random."""
        if horizon < 1:
            raise ConfigError(f"horizon {horizon}: the time score needs at least one step")
        self.horizon = horizon
        self.learns = learns
        self._punctual = punctual

    def weights(self, run: Outlook, uses: Uses) -> Array:
        agent, end = _steps(run, self.horizon)
        back, stay, soon = run.rates.use(uses.ever, uses.fresh, uses.older, uses.shared, uses.depth)
        use = back @ agent.T  # [R, K]: P(call k uses the node | alive)
        if run.current is not None:
            # Of the calls by the current agent, those that nobody else's call came before continue its visit.
            here = agent[:, run.current]
            staying = here * np.concatenate(([1.0], np.cumprod(here[:-1])))
            use += (stay - back)[:, run.current, None] * staying
        use[:, 0] = soon @ agent[0]
        use = np.minimum(use, 1.0 - end)
        pending = np.cumprod(np.maximum(0.0, 1.0 - end - use), axis=1)
        first = use.copy()
        first[:, 1:] *= pending[:, :-1]
        return first

    def discounts(self, now_s: float, clock: Clock) -> Array:
        if self._punctual:
            return np.asarray(1.0 / np.maximum(clock.start_s - now_s, _SOONEST_S))
        elapsed = np.maximum(0.0, now_s - clock.since_s)
        # The forecast may know this wait better than the agent's usual one: same shape, other length.
        usual = clock.mean_s / np.maximum(clock.start_s[:, 0] - clock.called_s, _SOONEST_S)
        usual = np.clip(usual, 0.1, 10.0)
        inverse = usual / (1.0 / np.maximum(at_elapsed(clock.curve, elapsed * usual), 1e-12) + clock.after_s)
        if clock.waiting_s is not None:
            # A queued call is served first come, first served: the longer it waits, the sooner it reads.
            queued = now_s - clock.waiting_s
            inverse = np.where(queued >= 0, (1.0 + np.maximum(queued, 0.0)) / _QUEUED_S, inverse)
        later = clock.start_s - clock.start_s[:, :1]
        return np.asarray(1.0 / (1.0 / np.maximum(inverse, 1e-12)[:, None] + later))


class StepsScore:
    """KVFlow's steps-to-execution (2507.07400): 1 / the earliest step at which an owner may call, best owner wins.

    Only fixed prompts count: what more than one run has read. Suffixes are worth nothing and go first, by recency.
    """

    name = "kvflow"
    retired_first = False
    timed = False
    learns = False
    combine: Literal["sum", "max"] = "max"

    def __init__(self, horizon: int = 10, possible: float = 0.05) -> None:
        """A step at which an agent calls with a probability of at least `possible` counts as its execution."""
        self.horizon = horizon
        self._possible = possible

    def weights(self, run: Outlook, uses: Uses) -> Array:
        agent, end = _steps(run, self.horizon)
        alive = np.concatenate(([1.0], np.cumprod(1.0 - end[:-1])))
        may = (uses.ever[:, None, :] & ((agent * alive[:, None]) >= self._possible)[None]).any(-1)  # [R, K]
        earliest = may & (np.cumsum(may, axis=1) == 1)
        return np.asarray(earliest * uses.shared[:, None] / np.arange(1, self.horizon + 1))

    def discounts(self, now_s: float, clock: Clock) -> Array:
        return np.ones((len(clock.called_s), self.horizon))


def score_of(policy: str) -> Score:
    """The score behind a policy of `config.POLICIES`. `session` is SGLang's own and `lru` where it asks us."""
    match policy:
        case "lru" | "session":
            return RecencyScore()
        case "lae":
            return RecencyScore("lae", retired_first=True)
        case "kvflow":
            return StepsScore()
        case "he" | "pbkv":
            return PaperScore()
        case "pbkv+":
            return TimeScore()
        case "oracle":
            return TimeScore(horizon=40, punctual=True)
    raise ConfigError(f"policy {policy!r} has no score; known are lru, session, lae, kvflow, he, pbkv, pbkv+, oracle")

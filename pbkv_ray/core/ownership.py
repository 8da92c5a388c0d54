"""The nouns of ownership: a run as an engine knows it, one way to know nodes, and what nodes with equal owners share.

A **run** has a forecast. A **use** is one way in which one run knows nodes: which of its agents, how lately, shared
or not, how deep. An **owner set** is what a node has: the uses of its active runs, how many of its runs have ended,
and whether foreign traffic has read it. `core.owners` keeps them, `core.worth` says what they are worth.
"""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from pbkv_ray.core.forecast import Forecast
from pbkv_ray.core.scores import Outlook
from pbkv_ray.errors import ConfigError

EVERY_WORKFLOW = "\0every"
MASK = (1 << 64) - 1
RETIRED, ACTIVE = 0, 1

Rank = tuple[int, float]  # lower goes first: (RETIRED, owning runs) or (ACTIVE, score)
UseKey = tuple[int, int, int, bool, int]  # ever, fresh and older mask (see scores.Uses), shared, depth class
EVERYTHING: UseKey = (MASK, MASK, MASK, True, 0)  # a use that knows all: the upper estimate of a popular node
Owner = tuple[int, int, int, int]  # run serial; ever, fresh and older mask
SetKey = tuple[tuple[Owner, ...], int, bool, bool, int, str]


@dataclass(slots=True, eq=False)
class Run:
    """One active run, as the engine knows it."""

    run_id: str
    serial: int
    workflow: str
    agents: dict[str, int] = field(default_factory=dict)  # name -> bit
    path: tuple[str, ...] = ()  # the last two agents that called
    called_s: float = 0.0
    shared_tokens: int = 0  # leading tokens of the latest prompt that other runs' prompts have too
    forecast: Forecast | None = None
    made_s: float = 0.0  # when the forecast was made
    version: int = -1
    waiting: str | None = None  # the agent whose call is in the engine's queue
    waiting_s: float = 0.0  # since when
    answered_s: float | None = None  # when the last of its calls ended; None: one is still running
    calling: int = 0  # calls that have begun and not ended
    uses: "dict[UseKey, Use]" = field(default_factory=dict)
    tips: dict[int, Any] = field(default_factory=dict)  # bit -> deepest node of the agent's latest prompt
    older_tips: dict[int, Any] = field(default_factory=dict)  # the same of the prompt that it left
    leaves: set[int] = field(default_factory=set)  # bits whose call that has just begun leaves their latest prompt
    # Kept by core.worth.
    slot: int = 0
    outlook: Outlook | None = None  # None: forecast or current agent changed since the uses were weighed
    unweighed: "list[Use]" = field(default_factory=list)

    @property
    def current(self) -> str | None:
        """The agent that called last."""
        return self.path[-1] if self.path else None


@dataclass(slots=True, eq=False)
class Use:
    run: Run
    key: UseKey
    slot: int
    sets: "dict[OwnerSet, None]" = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class OwnerSet:
    """What nodes with the same owners have in common. `owners` is sorted by run serial.

    ended: owning runs that have ended. foreign: traffic without a run has read the nodes. public: known to be the
    beginning of other runs' prompts too. popular: too many owners to name them; the workflow they all belong to.
    """

    serial: int
    owners: tuple[Owner, ...] = ()
    ended: int = 0
    foreign: bool = False
    public: bool = False
    depth: int = 0
    popular: str = ""
    uses: tuple[Use, ...] = ()
    band: int = ACTIVE
    nodes: int = 0
    tokens: list[int] = field(default_factory=lambda: [0, 0])  # resident per tier
    # Kept by core.worth.
    slot: int = 0
    span: tuple[int, int] = (0, 0)
    # Kept by core.order: nodes by recency, per tier, with lazy deletion.
    heaps: list[list[tuple[float, int, Any]]] = field(default_factory=lambda: [[], []])
    live: list[int] = field(default_factory=lambda: [0, 0])
    posted: list[int] = field(default_factory=lambda: [0, 0])
    host_only: dict[Any, None] = field(default_factory=dict)

    @property
    def key(self) -> SetKey:
        return (self.owners, self.ended, self.foreign, self.public, self.depth, self.popular)

    @property
    def shared(self) -> bool:
        return self.public or self.foreign or bool(self.popular) or len(self.owners) + self.ended > 1


@dataclass(frozen=True, slots=True)
class OwnersOptions:
    """Bounds. Beyond `max_owners` active runs a node is popular; `max_age_s` after it was made a forecast is void."""

    max_runs: int = 20_000
    max_agents: int = 64  # per run; later names share the last bit
    max_owners: int = 64
    ended_memory_s: float = 600.0
    max_ended: int = 65_536
    max_age_s: float = 600.0
    rescore_s: float = 0.0  # scores that move with the clock are brought up to date this often

    def __post_init__(self) -> None:
        if not 2 <= self.max_agents <= 64:
            raise ConfigError(f"max_agents is {self.max_agents}; agents are bits of a word, 2 to 64")
        if min(self.max_runs, self.max_owners, self.max_ended) < 1:
            raise ConfigError("max_runs, max_owners and max_ended must be at least 1")


class Ended:
    """Runs that ended lately: what still comes of them is late. Bounded: the one that ended first goes first."""

    def __init__(self, memory_s: float, most: int) -> None:
        self._memory_s, self._most = memory_s, most
        self._at_s: OrderedDict[str, float] = OrderedDict()

    def __iter__(self) -> Iterator[str]:
        return iter(self._at_s)

    def __contains__(self, run_id: object) -> bool:
        return run_id in self._at_s

    def __len__(self) -> int:
        return len(self._at_s)

    def add(self, run_id: str, now_s: float) -> None:
        self._at_s[run_id] = now_s
        if len(self._at_s) > self._most:
            self._at_s.popitem(last=False)

    def forget(self, now_s: float) -> None:
        """Those that ended too long ago."""
        while self._at_s and next(iter(self._at_s.values())) + self._memory_s <= now_s:
            self._at_s.popitem(last=False)


@dataclass(slots=True)
class OwnersCount:
    """What happened that was no news, and what the bounds cost."""

    late_calls: int = 0  # of ended runs
    late_forecasts: int = 0
    old_versions: int = 0
    double_ends: int = 0
    unknown_ends: int = 0
    expired_runs: int = 0  # ended here because the table was full
    shared_bits: int = 0  # agents beyond max_agents
    popular_nodes: int = 0
    bad_forecasts: int = 0


def known_from(
    owners: tuple[Owner, ...], serial: int, bit: int, fresh: bool | None, older: bool | None
) -> tuple[Owner, ...]:
    """The owners after `bit` of a run was set or cleared in its masks; None leaves a mask as it is."""

    def changed(mask: int, on: bool | None) -> int:
        return mask if on is None else mask | 1 << bit if on else mask & ~(1 << bit)

    return tuple(
        (owner, ever, changed(f, fresh), changed(o, older)) if owner == serial else (owner, ever, f, o)
        for owner, ever, f, o in owners
    )

"""Who owns what, and what that is worth: runs, interned owner sets, and their scores.

Nodes with the same owners score alike, and there are only hundreds of distinct owner sets. So everything that
changes with forecasts and time happens here, per set; `core.reuse` keeps the nodes of a set in order of recency.

Three levels: a **run** has a forecast; a **use** (`_Use`) is one way in which one run knows nodes (which agents,
how lately, shared or not, how deep) and has one row of weights; an **owner set** is what a node has: the uses of its
active runs, the number of its ended ones, and whether foreign traffic has read it.
"""

import heapq
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from pbkv_ray.core.forecast import Array, Forecast
from pbkv_ray.core.ghost import LearnedReuse, certain
from pbkv_ray.core.scores import Clock, Outlook, Score, Uses
from pbkv_ray.core.waits import ELAPSED_S, WaitingTimes

_EVERY_WORKFLOW = "\0every"
_MASK = (1 << 64) - 1
_ALL_KEY = (_MASK, _MASK, True, 0)  # knows everything: the upper estimate of a popular node

Rank = tuple[int, float]  # lower goes first: (0, owning runs) for retired sets, (1, score) for all others
RETIRED, ACTIVE = 0, 1


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


@dataclass(slots=True, eq=False)
class Run:
    """One active run, as the engine knows it."""

    run_id: str
    serial: int
    slot: int
    workflow: str
    agents: dict[str, int] = field(default_factory=dict)  # name -> bit
    current: str | None = None
    called_s: float = 0.0
    shared_tokens: int = 0  # leading tokens of the latest prompt that other runs' prompts have too
    forecast: Forecast | None = None
    version: int = -1
    uses: "dict[_UseKey, _Use]" = field(default_factory=dict)
    tips: dict[int, Any] = field(default_factory=dict)  # bit -> deepest node of the agent's latest prompt
    outlook: Outlook | None = None  # None: forecast or current agent changed since the uses were weighed
    unweighed: "list[_Use]" = field(default_factory=list)


_UseKey = tuple[int, int, bool, int]  # ever mask, fresh mask, shared, depth class


@dataclass(slots=True, eq=False)
class _Use:
    run: Run
    key: _UseKey
    slot: int
    sets: "dict[OwnerSet, None]" = field(default_factory=dict)


Owner = tuple[int, int, int]  # run serial, ever mask, fresh mask
_SetKey = tuple[tuple[Owner, ...], int, bool, bool, int, str]


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
    slot: int = 0
    uses: tuple[_Use, ...] = ()
    band: int = ACTIVE
    nodes: int = 0
    tokens: list[int] = field(default_factory=lambda: [0, 0])  # resident per tier
    span: tuple[int, int] = (0, 0)  # its pairs
    # Owned by core.reuse: nodes by recency, per tier, with lazy deletion.
    heaps: list[list[tuple[float, int, Any]]] = field(default_factory=lambda: [[], []])
    live: list[int] = field(default_factory=lambda: [0, 0])
    posted: list[int] = field(default_factory=lambda: [0, 0])
    host_only: dict[Any, None] = field(default_factory=dict)

    @property
    def key(self) -> _SetKey:
        return (self.owners, self.ended, self.foreign, self.public, self.depth, self.popular)

    @property
    def shared(self) -> bool:
        return self.public or self.foreign or bool(self.popular) or len(self.owners) + self.ended > 1


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


class Owners:
    """Runs, owner sets and their ranks. Single-threaded; deterministic: same calls, same ranks on every machine."""

    def __init__(
        self,
        score: Score,
        options: OwnersOptions,
        reuse: LearnedReuse | None = None,
        waits: WaitingTimes | None = None,
    ) -> None:
        self.score = score
        self.options = options
        self.learned = reuse if reuse is not None else LearnedReuse()
        self.waits = waits if waits is not None else WaitingTimes()
        self.count = OwnersCount()
        self.now_s = 0.0
        self.retired_tokens = [0, 0]
        self.runs: OrderedDict[str, Run] = OrderedDict()  # longest silent first
        self._by_serial: dict[int, Run] = {}
        self._ended: OrderedDict[str, float] = OrderedDict()
        self._sets: dict[_SetKey, OwnerSet] = {}  # by name, for interning
        self._all: dict[OwnerSet, OwnerSet] = {}  # also those whose name another set has taken
        self._active: dict[int, OwnerSet] = {}  # by slot: sets whose rank is a score
        self._popular: dict[OwnerSet, None] = {}
        self._moved: dict[OwnerSet, None] = {}  # rank changed by an event, not reported yet
        self._unweighed: dict[Run, None] = {}
        self._serial = 0
        self._stale = False  # some weights or memberships changed since the last rescore
        self._scored_s = -np.inf
        self._expires_s = np.inf  # the first forecast that ages out
        horizon = score.horizon
        # Rows: uses (slot 0 unused), runs (slot 0 = none), sets (slot 0 = trash). All grow by doubling.
        self._weights: Array = np.zeros((64, horizon))
        self._use_run: npt.NDArray[np.intp] = np.zeros(64, np.intp)
        self._called_s: Array = np.zeros(16)
        self._made_s: Array = np.full(16, -np.inf)
        self._curve: Array = np.ones((16, len(ELAPSED_S)))
        self._later_s: Array = np.zeros((16, horizon))
        self._scores: Array = np.zeros(64)
        self.first = [np.full(64, np.inf), np.full(64, np.inf)]  # kept by core.reuse: oldest recency, per tier
        self._pair_set: npt.NDArray[np.intp] = np.zeros(256, np.intp)
        self._pair_use: npt.NDArray[np.intp] = np.zeros(256, np.intp)
        self._pairs = 0
        self._pairs_live = 0
        self._use_slots, self._run_slots, self._set_slots = _Slots(), _Slots(), _Slots()
        self.nobody = self._intern((), 0, False, False, 0, "")

    # Runs

    def run(self, run_id: str, workflow: str = "") -> Run | None:
        """The active run, registered if it is new; None for a run that has ended (a late event)."""
        known = self.runs.get(run_id)
        if known is not None:
            self.runs.move_to_end(run_id)
            return known
        if run_id in self._ended:
            return None
        if len(self.runs) >= self.options.max_runs:
            self.count.expired_runs += 1
            self.end(next(iter(self.runs)))
        self._serial += 1
        slot = self._run_slots.take()
        self._called_s = _room(self._called_s, slot)
        self._made_s = _room(self._made_s, slot)
        self._curve = _room(self._curve, slot)
        self._later_s = _room(self._later_s, slot)
        self._called_s[slot], self._made_s[slot], self._later_s[slot] = self.now_s, -np.inf, 0.0
        self._curve[slot], _ = self.waits.curve(workflow, "")
        run = Run(run_id, self._serial, slot, workflow, called_s=self.now_s)
        self.runs[run_id] = self._by_serial[run.serial] = run
        self._use(run, _ALL_KEY)
        self._rank_popular()
        return run

    def called(self, run: Run, agent: str, blocks: Sequence[int] | None, at_s: float) -> None:
        """A call of `agent` begins. `blocks`: prefix-chained ids of its prompt (ghost.block_hashes), if known."""
        if run.current is not None:
            self.waits.observe(run.workflow, run.current, at_s - run.called_s)
        if blocks is not None and self.score.learns:
            run.shared_tokens = self.learned.observe(run.workflow, run.run_id, agent, run.current, blocks)
        self.bit(run, agent)
        run.current, run.called_s = agent, at_s
        self._called_s[run.slot] = at_s
        self._curve[run.slot], _ = self.waits.curve(run.workflow, agent)
        if run.forecast is not None:
            self._look(run)

    def forecast(self, run: Run, forecast: Forecast, version: int, at_s: float) -> None:
        """What the run is expected to call next; an older version than the last one is ignored and counted."""
        if version <= run.version:
            self.count.old_versions += 1
            return
        run.version = version
        if not np.isfinite(forecast.step).all() or (forecast.step < 0).any():
            self.count.bad_forecasts += 1
            return
        run.forecast = forecast
        self._made_s[run.slot] = at_s
        self._expires_s = min(self._expires_s, at_s + self.options.max_age_s)
        for agent in forecast.agents:
            self.bit(run, agent)
        self._look(run)

    def end(self, run_id: str) -> None:
        """Forgets the run; its sets move to the front. No-op for a run that has ended already.

        A run that was never heard of is remembered as ended all the same: its calls may still be on the way.
        """
        if run_id in self._ended:
            self.count.double_ends += 1
            return
        self._ended[run_id] = self.now_s
        if len(self._ended) > self.options.max_ended:
            self._ended.popitem(last=False)
        self.learned.end(run_id)
        run = self.runs.pop(run_id, None)
        if run is None:
            self.count.unknown_ends += 1
            return
        del self._by_serial[run.serial]
        self._unweighed.pop(run, None)
        for use in list(run.uses.values()):
            for owned in use.sets:
                self._without(owned, run)
            self._drop_use(use)
        self._made_s[run.slot] = -np.inf
        self._run_slots.give(run.slot)
        self._rank_popular()

    def tick(self, at_s: float) -> None:
        """The broadcast clock says `at_s`; it never runs backwards."""
        self.now_s = max(self.now_s, at_s)
        while self._ended:
            run_id, ended_s = next(iter(self._ended.items()))
            if ended_s + self.options.ended_memory_s > self.now_s:
                break
            del self._ended[run_id]

    def has_ended(self, run_id: str) -> bool:
        return run_id in self._ended

    def bit(self, run: Run, agent: str) -> int:
        known = run.agents.get(agent)
        if known is None:
            last = self.options.max_agents - 1
            if len(run.agents) < last:
                known = run.agents[agent] = len(run.agents)
            else:
                known = last
                self.count.shared_bits += 1
        return known

    # Sets

    def add_owner(self, owned: OwnerSet, run: Run, bit: int, public: bool = False) -> OwnerSet:
        """The set that a node of `owned` belongs to once `bit` of `run` has read it."""
        mask = 1 << bit
        public = public or owned.public
        if owned.popular:
            name = owned.popular if owned.popular == run.workflow else _EVERY_WORKFLOW
            return self._intern((), 0, owned.foreign, True, owned.depth, name)
        at, owners = 0, owned.owners
        while at < len(owners) and owners[at][0] < run.serial:
            at += 1
        if at < len(owners) and owners[at][0] == run.serial:
            _, ever, fresh = owners[at]
            owners = (*owners[:at], (run.serial, ever | mask, fresh | mask), *owners[at + 1 :])
        else:
            owners = (*owners[:at], (run.serial, mask, mask), *owners[at:])
            if len(owners) > self.options.max_owners:
                self.count.popular_nodes += 1
                flows = {use.run.workflow for use in owned.uses}
                name = run.workflow if flows == {run.workflow} else _EVERY_WORKFLOW
                return self._intern((), 0, owned.foreign, True, owned.depth, name or _EVERY_WORKFLOW)
        return self._intern(owners, owned.ended, owned.foreign, public, owned.depth, "")

    def leave_behind(self, owned: OwnerSet, run: Run, bit: int) -> OwnerSet:
        """The same nodes after the agent's latest prompt has left them: read once, not fresh any more."""
        owners = tuple(
            (serial, ever, fresh & ~(1 << bit)) if serial == run.serial else (serial, ever, fresh)
            for serial, ever, fresh in owned.owners
        )
        if owners == owned.owners:
            return owned
        return self._intern(owners, owned.ended, owned.foreign, owned.public, owned.depth, "")

    def add_foreign(self, owned: OwnerSet) -> OwnerSet:
        """Traffic without a run has read the node: it is never retired again."""
        if owned.foreign:
            return owned
        return self._intern(owned.owners, owned.ended, True, owned.public, owned.depth, owned.popular)

    def add_late(self, owned: OwnerSet) -> OwnerSet:
        """Only a run that has ended has read the node (its last tokens came late): retired from the start."""
        if owned.owners or owned.ended or owned.foreign or owned.popular:
            return owned
        return self._intern((), 1, False, owned.public, owned.depth, "")

    def at_depth(self, owned: OwnerSet, depth: int) -> OwnerSet:
        if owned.depth == depth:
            return owned
        return self._intern(owned.owners, owned.ended, owned.foreign, owned.public, depth, owned.popular)

    def join(self, owned: OwnerSet) -> None:
        owned.nodes += 1

    def leave(self, owned: OwnerSet) -> None:
        owned.nodes -= 1
        if owned.nodes == 0 and owned is not self.nobody:
            self._forget(owned)

    def count_tokens(self, owned: OwnerSet, tier: int, tokens: int) -> None:
        owned.tokens[tier] += tokens
        if owned.band == RETIRED:
            self.retired_tokens[tier] += tokens

    def _intern(
        self, owners: tuple[Owner, ...], ended: int, foreign: bool, public: bool, depth: int, popular: str
    ) -> OwnerSet:
        known = self._sets.get((owners, ended, foreign, public, depth, popular))
        if known is not None:
            return known
        self._serial += 1
        new = OwnerSet(self._serial, owners, ended, foreign, public, depth, popular)
        self._sets[new.key] = self._all[new] = new
        if popular or owners:
            new.slot = self._set_slots.take()
            self._scores = _room(self._scores, new.slot)
            self.first = [_room(first, new.slot) for first in self.first]
            for first in self.first:
                first[new.slot] = np.inf
            self._active[new.slot] = new
        if popular:
            self._popular[new] = None
            self._stale = True
        elif owners:
            new.uses = tuple(
                self._use(self._by_serial[serial], (ever, fresh, new.shared, depth)) for serial, ever, fresh in owners
            )
            for use in new.uses:
                use.sets[new] = None
            self._add_pairs(new)
        self._rank(new)
        return new

    def _forget(self, owned: OwnerSet) -> None:
        if self._sets.get(owned.key) is owned:
            del self._sets[owned.key]
        del self._all[owned]
        self._popular.pop(owned, None)
        self._moved.pop(owned, None)
        for use in owned.uses:
            del use.sets[owned]
            if not use.sets:
                self._drop_use(use)
        self._deactivate(owned)

    def _without(self, owned: OwnerSet, run: Run) -> None:
        """`run`, one of the owners, has ended. The set keeps its nodes; no node is visited."""
        if self._sets.get(owned.key) is owned:
            del self._sets[owned.key]
        owned.owners = tuple(owner for owner in owned.owners if owner[0] != run.serial)
        owned.uses = tuple(use for use in owned.uses if use.run is not run)
        owned.ended += 1
        self._sets.setdefault(owned.key, owned)  # taken: then this one only loses nodes, and needs no name
        if owned.owners:
            self._drop_pairs(owned)
            self._add_pairs(owned)
        else:
            self._deactivate(owned)
        self._rank(owned)

    def _deactivate(self, owned: OwnerSet) -> None:
        if owned.slot:
            self._drop_pairs(owned)
            del self._active[owned.slot]
            for first in self.first:
                first[owned.slot] = np.inf
            self._set_slots.give(owned.slot)
            self._scores[owned.slot] = 0.0
            owned.slot = 0

    def rank(self, owned: OwnerSet) -> Rank:
        """As of the last `rescore`."""
        if owned.band == RETIRED:
            return (RETIRED, float(self.options.max_owners + 1 if owned.popular else owned.ended))
        return (ACTIVE, self.worth(owned))

    def worth(self, owned: OwnerSet) -> float:
        return float(self._scores[owned.slot])

    def _rank(self, owned: OwnerSet) -> None:
        """Retired or not; scores are left to `rescore`."""
        if owned.popular:
            live = any(owned.popular in (run.workflow, _EVERY_WORKFLOW) for run in self.runs.values())
        else:
            live = bool(owned.owners)
        used = owned.ended > 0 or bool(owned.popular)
        retired = self.score.retired_first and used and not live and not owned.foreign
        if retired != (owned.band == RETIRED):
            owned.band = RETIRED if retired else ACTIVE
            sign = 1 if retired else -1
            self.retired_tokens[0] += sign * owned.tokens[0]
            self.retired_tokens[1] += sign * owned.tokens[1]
        self._moved[owned] = None

    def _rank_popular(self) -> None:
        for owned in self._popular:
            self._rank(owned)

    @property
    def size(self) -> int:
        return len(self._all)

    def sets(self) -> Iterator[OwnerSet]:
        return iter(self._all)

    # Scores

    def rescore(self) -> list[OwnerSet]:
        """Brings scores up to date; returns the sets that became or ceased to be retired, or worth nothing, since the
        last call. One pass over arrays, and nothing per set that only became worth more or less."""
        changed = list(self._moved)
        self._moved.clear()
        moved = self.score.timed and self.now_s - self._scored_s >= self.options.rescore_s
        if not (self._stale or moved or self.now_s >= self._expires_s):
            return changed
        for run in self._unweighed:
            self._weigh(run)
        self._unweighed.clear()
        shares = self._shares()
        scores = np.zeros(self._set_slots.high)
        sets, uses = self._pair_set[: self._pairs], self._pair_use[: self._pairs]
        if self.score.combine == "sum":
            scores += np.bincount(sets, shares[uses], minlength=len(scores))[: len(scores)]
        else:
            np.maximum.at(scores, sets, shares[uses])
        scores[0] = 0.0
        self._score_popular(scores, shares)
        old = self._scores[: len(scores)]
        changed += [self._active[slot] for slot in np.flatnonzero((scores > 0) != (old > 0)).tolist()]
        self._scores[: len(scores)] = scores
        self._stale, self._scored_s = False, self.now_s
        return changed

    def lowest(self, tier: int) -> OwnerSet | None:
        """Of the sets of positive score that have a node in `first[tier]`: the one whose oldest node goes first."""
        high = self._set_slots.high
        first, scores = self.first[tier][:high], self._scores[:high]
        candidate = (scores > 0) & (first < np.inf)
        worth = np.where(candidate, scores, np.inf)
        least = worth.min()
        if least == np.inf:
            return None
        return self._active[int(np.where(worth == least, first, np.inf).argmin())]

    def _shares(self) -> Array:
        """[use slots]: what one use of a node is worth now; zero once its forecast has aged out."""
        n = self._run_slots.high
        clock = Clock(self._called_s[:n], self._curve[:n], self._later_s[:n])
        discounts = self.score.discounts(self.now_s, clock)
        void = self._made_s[:n] + self.options.max_age_s
        old = void <= self.now_s
        self._expires_s = float(void[~old].min(initial=np.inf))
        discounts = np.where(old[:, None], 0.0, discounts)
        m = self._use_slots.high
        return np.asarray((self._weights[:m] * discounts[self._use_run[:m]]).sum(1))

    def _score_popular(self, scores: Array, shares: Array) -> None:
        for owned in self._popular:
            for run in self.runs.values():
                if owned.popular in (run.workflow, _EVERY_WORKFLOW):
                    scores[owned.slot] += shares[run.uses[_ALL_KEY].slot]

    def next_call(self, owned: OwnerSet) -> float:
        """Paper Eq. 1: what the next calls of the owners are expected to use of the set's nodes. After `rescore`."""
        if owned.popular:
            runs = (r for r in self.runs.values() if owned.popular in (r.workflow, _EVERY_WORKFLOW))
            uses = tuple(run.uses[_ALL_KEY] for run in runs)
        else:
            uses = owned.uses
        fresh_s = self.now_s - self.options.max_age_s
        return float(sum(self._weights[u.slot, 0] for u in uses if self._made_s[u.run.slot] > fresh_s))

    def _weigh(self, run: Run) -> None:
        """Weights of the uses that have none yet; of all of them after a new forecast or call."""
        if run.forecast is None:
            return
        if run.outlook is None:
            run.outlook = self._outlook(run, run.forecast)
            run.unweighed = list(run.uses.values())
            later = run.forecast.wait_s
            _, mean_s = self.waits.curve(run.workflow, run.current or "")
            steps = np.arange(self.score.horizon)
            if later is None:
                self._later_s[run.slot] = steps * mean_s
            else:
                gaps = np.maximum.accumulate(np.maximum(0.0, later - later[0]))
                self._later_s[run.slot] = gaps[np.minimum(steps, len(gaps) - 1)]
        uses = [use for use in run.unweighed if run.uses.get(use.key) is use]
        run.unweighed = []
        if not uses:
            return
        width = run.outlook.agent.shape[1]
        bits = np.arange(width, dtype=np.uint64)
        ever, fresh = (
            (np.array([use.key[i] for use in uses], np.uint64)[:, None] >> bits & np.uint64(1)) > 0 for i in (0, 1)
        )
        kinds = Uses(ever, fresh, np.array([use.key[2] for use in uses]), np.array([use.key[3] for use in uses]))
        self._weights[[use.slot for use in uses]] = self.score.weights(run.outlook, kinds)

    def _outlook(self, run: Run, forecast: Forecast) -> Outlook:
        names = list(run.agents)
        width = max(run.agents.values(), default=0) + 1
        if len(names) >= self.options.max_agents - 1:
            names, width = [*names, "\0others"], self.options.max_agents
        agent = np.zeros((len(forecast.step), width))
        for column, name in enumerate(forecast.agents):
            agent[:, run.agents.get(name, width - 1)] += forecast.step[:, column]
        rates = self.learned.rates(run.workflow, names) if self.score.learns else certain(width)
        current = None if run.current is None else self.bit(run, run.current)
        return Outlook(agent, forecast.step[:, -1], current, rates)

    def _look(self, run: Run) -> None:
        run.outlook = None
        self._unweighed[run] = None
        self._stale = True

    def _use(self, run: Run, key: _UseKey) -> _Use:
        known = run.uses.get(key)
        if known is None:
            slot = self._use_slots.take()
            self._weights = _room(self._weights, slot)
            self._use_run = _room(self._use_run, slot)
            self._weights[slot] = 0.0
            self._use_run[slot] = run.slot
            known = run.uses[key] = _Use(run, key, slot)
            if run.forecast is not None:
                run.unweighed.append(known)
                self._unweighed[run] = None
        return known

    def _drop_use(self, use: _Use) -> None:
        del use.run.uses[use.key]
        self._weights[use.slot] = 0.0
        self._use_run[use.slot] = 0
        self._use_slots.give(use.slot)

    # Pairs of (set, use): what one bincount sums up.

    def _add_pairs(self, owned: OwnerSet) -> None:
        if self._pairs > 2 * self._pairs_live + 256:
            self._pairs = self._pairs_live = 0
            for other in self._active.values():
                if other is not owned:
                    self._write_pairs(other)
        self._write_pairs(owned)
        self._stale = True

    def _write_pairs(self, owned: OwnerSet) -> None:
        start, end = self._pairs, self._pairs + len(owned.uses)
        self._pair_set, self._pair_use = _room(self._pair_set, end), _room(self._pair_use, end)
        self._pair_set[start:end] = owned.slot
        self._pair_use[start:end] = [use.slot for use in owned.uses]
        owned.span, self._pairs, self._pairs_live = (start, end), end, self._pairs_live + end - start

    def _drop_pairs(self, owned: OwnerSet) -> None:
        start, end = owned.span
        self._pair_set[start:end] = self._pair_use[start:end] = 0
        owned.span, self._pairs_live = (0, 0), self._pairs_live - (end - start)
        self._stale = True

    def check_invariants(self) -> None:
        """Raises AssertionError with what is wrong; O(sets x owners)."""
        assert set(self.runs).isdisjoint(self._ended), "a run is active and ended"
        assert {run.serial: run for run in self.runs.values()} == self._by_serial
        uses = {use for run in self.runs.values() for use in run.uses.values()}
        for owned in self._all:
            assert owned is self.nobody or owned.nodes > 0, f"nobody needs {owned.key}"
            assert [use.run.serial for use in owned.uses] == [owner[0] for owner in owned.owners]
            assert uses.issuperset(owned.uses), f"{owned.key} is owned by a run that has ended"
            assert all(owned in use.sets for use in owned.uses)
            assert (owned.slot > 0) == bool(owned.owners or owned.popular)
            start, end = owned.span
            assert (self._pair_set[start:end] == owned.slot).all()
            assert self._pair_use[start:end].tolist() == [use.slot for use in owned.uses]
        assert set(self._active.values()) == {owned for owned in self._all if owned.slot}
        assert all(use.sets or use.key == _ALL_KEY for use in uses), "a use without a set"
        assert all(owned in self._all for use in uses for owned in use.sets)
        assert self._pairs_live == sum(len(owned.uses) for owned in self._active.values())
        slots = [use.slot for use in uses]
        assert len(slots) == len(set(slots)), "two uses share a row"
        assert len(slots) == self._use_slots.high - 1 - self._use_slots.spare
        assert len(self.runs) == self._run_slots.high - 1 - self._run_slots.spare
        assert len(self._ended) <= self.options.max_ended and len(self.runs) <= self.options.max_runs


class _Slots:
    """Row numbers of a growing array; 0 is never given out."""

    def __init__(self) -> None:
        self.high = 1
        self._free: list[int] = []

    @property
    def spare(self) -> int:
        return len(self._free)

    def take(self) -> int:
        if self._free:
            return heapq.heappop(self._free)
        self.high += 1
        return self.high - 1

    def give(self, slot: int) -> None:
        heapq.heappush(self._free, slot)


_A = TypeVar("_A", bound=np.generic)


def _room(array: npt.NDArray[_A], index: int) -> npt.NDArray[_A]:
    """The array, at least `index + 1` long: doubled, zeros behind."""
    if index < len(array):
        return array
    bigger = np.zeros((max(index + 1, 2 * len(array)), *array.shape[1:]), array.dtype)
    bigger[: len(array)] = array
    return bigger

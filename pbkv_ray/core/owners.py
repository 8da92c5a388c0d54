"""Who owns what: the runs that are active, the ones that have ended, and interned owner sets.

Nodes with the same owners score alike, and there are only hundreds of distinct owner sets: so nodes carry a set, not
owners, and a run that changes touches its sets, not its nodes. Late and repeated news (calls and forecasts of ended
runs, double ends, old versions) are no-ops, counted; ended runs are remembered for a while for that purpose.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from pbkv_ray.core.forecast import Forecast
from pbkv_ray.core.ghost import LearnedReuse
from pbkv_ray.core.ownership import (
    ACTIVE,
    EVERY_WORKFLOW,
    EVERYTHING,
    RETIRED,
    Ended,
    Owner,
    OwnersCount,
    OwnerSet,
    OwnersOptions,
    Rank,
    Run,
    SetKey,
    known_from,
)
from pbkv_ray.core.scores import Score
from pbkv_ray.core.waits import WaitingTimes
from pbkv_ray.core.worth import Worth

__all__ = ["Owners", "OwnersCount", "OwnersOptions"]


class Owners:
    """Runs and owner sets. Single-threaded; deterministic: same calls, same ranks on every machine."""

    def __init__(
        self,
        score: Score,
        options: OwnersOptions,
        learned: LearnedReuse | None = None,
        waits: WaitingTimes | None = None,
    ) -> None:
        self.score = score
        self.options = options
        self.learned = learned if learned is not None else LearnedReuse()
        self.waits = waits if waits is not None else WaitingTimes()
        self.worth = Worth(score, self.learned, self.waits, options)
        self.count = OwnersCount()
        self.now_s = 0.0
        self.retired_tokens = [0, 0]  # per tier
        self.runs: OrderedDict[str, Run] = OrderedDict()  # longest silent first
        self._by_serial: dict[int, Run] = {}
        self._ended = Ended(options.ended_memory_s, options.max_ended)
        self._sets: dict[SetKey, OwnerSet] = {}  # by name, for interning
        self._all: dict[OwnerSet, None] = {}  # also those whose name another set has taken
        self._popular: dict[OwnerSet, None] = {}
        self._moved: dict[OwnerSet, None] = {}  # new, or retired, since `moved` was last called
        self._serial = 0
        self.ending: Callable[[], None] = lambda: None  # called before a run ends: its last uses may be waiting
        self.nobody = self._intern((), 0, False, False, 0, "")

    # Runs

    def run(self, run_id: str, workflow: str = "") -> Run | None:
        """The active run, registered if it is new; None for a run that has ended (a late event)."""
        if workflow == EVERY_WORKFLOW:
            workflow = ""
        known = self.runs.get(run_id)
        if known is not None:
            self.runs.move_to_end(run_id)
            if workflow and not known.workflow:  # a forecast may come before the run's first call
                self.worth.name(known, workflow)
                self._rank_popular()
            return known
        if run_id in self._ended:
            return None
        if len(self.runs) >= self.options.max_runs:
            self.count.expired_runs += 1
            self.end(next(iter(self.runs)))
        self._serial += 1
        run = self.runs[run_id] = Run(run_id, self._serial, workflow, called_s=self.now_s)
        self._by_serial[run.serial] = run
        self.worth.open(run)
        self._rank_popular()
        return run

    def waits_for(self, run_id: str, agent: str, workflow: str = "") -> None:
        """A call of `agent` has joined the engine's queue: what it will read is needed next, not what comes after."""
        run = self.run(run_id, workflow)
        if run is not None and self.score.timed:
            self.bit(run, agent)
            run.waiting, run.waiting_s = agent, self.now_s
            self.worth.look(run)

    def called(self, run: Run, agent: str, blocks: Sequence[int] | None) -> None:
        """A call of `agent` begins now. `blocks`: prefix-chained ids of its prompt, if known."""
        if run.current is not None:
            answer_s = None if run.answered_s is None else run.answered_s - run.called_s
            self.waits.observe(run.workflow, run.current, self.now_s - run.called_s, answer_s)
        if blocks is not None and self.score.learns:
            run.shared_tokens, leaves = self.learned.observe(run.workflow, run.run_id, agent, run.path, blocks)
            run.leaves |= {self.bit(run, agent)} if leaves else set()
        self.bit(run, agent)
        run.path, run.called_s = (*run.path[-1:], agent), self.now_s
        run.waiting, run.answered_s, run.calling = None, None, run.calling + 1
        self.worth.called(run)

    def answered(self, run_id: str) -> None:
        """A call of the run has ended. It answers while others run; no-op if it is not active, or has not called."""
        run = self.runs.get(run_id)
        if run is not None and run.current is not None:
            run.calling = max(0, run.calling - 1)
            if not run.calling:
                run.answered_s = self.now_s
                self.worth.answered(run)

    def forecast(self, run: Run, forecast: Forecast, version: int, at_s: float) -> None:
        """What the run is expected to call next; an older version than the last one is ignored and counted."""
        if version <= run.version:
            self.count.old_versions += 1
            return
        if not len(forecast.step) or not np.isfinite(forecast.step).all() or (forecast.step < 0).any():
            self.count.bad_forecasts += 1
            return
        run.version, run.forecast, run.made_s = version, forecast, at_s
        for agent in forecast.agents:
            self.bit(run, agent)
        self.worth.look(run)
        self.worth.prepare(self.now_s)

    def end(self, run_id: str) -> None:
        """Forgets the run; its sets move to the front. No-op for a run that has ended already.

        A run that was never heard of is remembered as ended all the same: its calls may still be on the way.
        """
        if run_id in self._ended:
            self.count.double_ends += 1
            return
        self.ending()
        self._ended.add(run_id, self.now_s)
        self.learned.end(run_id)
        run = self.runs.pop(run_id, None)
        if run is None:
            self.count.unknown_ends += 1
            return
        del self._by_serial[run.serial]
        for use in list(run.uses.values()):
            for owned in use.sets:
                self._without(owned, run)
            if use.key != EVERYTHING:
                self.worth.drop(use)
        self.worth.close(run)
        self._rank_popular()

    def tick(self, at_s: float) -> None:
        """The broadcast clock says `at_s`; it never runs backwards."""
        self.now_s = max(self.now_s, at_s)
        self._ended.forget(self.now_s)

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
            name = owned.popular if owned.popular == run.workflow else EVERY_WORKFLOW
            return self._intern((), 0, owned.foreign, True, owned.depth, name)
        at, owners = 0, owned.owners
        while at < len(owners) and owners[at][0] < run.serial:
            at += 1
        if at < len(owners) and owners[at][0] == run.serial:
            _, ever, fresh, older = owners[at]
            owners = (*owners[:at], (run.serial, ever | mask, fresh | mask, older), *owners[at + 1 :])
        else:
            owners = (*owners[:at], (run.serial, mask, mask, 0), *owners[at:])
            if len(owners) > self.options.max_owners:
                self.count.popular_nodes += 1
                flows = {use.run.workflow for use in owned.uses}
                name = run.workflow if flows == {run.workflow} else EVERY_WORKFLOW
                return self._intern((), 0, owned.foreign, True, owned.depth, name or EVERY_WORKFLOW)
        return self._intern(owners, owned.ended, owned.foreign, public, owned.depth, "")

    def turn(self, owned: OwnerSet, run: Run, bit: int, fresh: bool | None, older: bool | None) -> OwnerSet:
        """The same nodes; whether they are in the agent's latest prompt, and in the one that it left. None: as is."""
        owners = known_from(owned.owners, run.serial, bit, fresh, older)
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

    @property
    def size(self) -> int:
        return len(self._all)

    def residency(self) -> dict[str, tuple[int, int]]:
        held: dict[str, tuple[int, int]] = {}
        for owned in self.sets():
            if owned.tokens[0] or owned.tokens[1]:
                for use in owned.uses:
                    device, host = held.get(use.run.run_id, (0, 0))
                    held[use.run.run_id] = (device + owned.tokens[0], host + owned.tokens[1])
        return held

    def sets(self) -> Iterator[OwnerSet]:
        return iter(self._all)

    def rank(self, owned: OwnerSet) -> Rank:
        """Lower goes first. Scores are as of the last `rescore`."""
        if owned.band == RETIRED:
            return (RETIRED, float(self.options.max_owners + 1 if owned.popular else owned.ended))
        return (ACTIVE, self.worth.of(owned))

    def moved(self) -> list[OwnerSet]:
        """Sets that came up, or that events retired or revived, since the last call."""
        moved = list(self._moved)
        self._moved.clear()
        return moved

    def rescore(self) -> list[OwnerSet]:
        """Brings scores up to date; returns the sets that became, or ceased to be, worth nothing."""
        return self.worth.rescore(self.now_s)

    def _intern(
        self, owners: tuple[Owner, ...], ended: int, foreign: bool, public: bool, depth: int, popular: str
    ) -> OwnerSet:
        known = self._sets.get((owners, ended, foreign, public, depth, popular))
        if known is not None:
            return known
        self._serial += 1
        new = OwnerSet(self._serial, owners, ended, foreign, public, depth, popular)
        self._sets[new.key] = new
        self._all[new] = None
        if popular:
            self._popular[new] = None
        elif owners:
            runs = self._by_serial
            new.uses = tuple(self.worth.use(runs[s], (e, f, o, new.shared, depth)) for s, e, f, o in owners)
            for use in new.uses:
                use.sets[new] = None
        if popular or owners:
            self.worth.enlist(new)
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
            if not use.sets and use.key != EVERYTHING:
                self.worth.drop(use)
        self.worth.strike(owned)

    def _without(self, owned: OwnerSet, run: Run) -> None:
        """`run`, one of the owners, has ended. The set keeps its nodes; no node is visited."""
        if self._sets.get(owned.key) is owned:
            del self._sets[owned.key]
        owned.owners = tuple(owner for owner in owned.owners if owner[0] != run.serial)
        owned.uses = tuple(use for use in owned.uses if use.run is not run)
        owned.ended += 1
        self._sets.setdefault(owned.key, owned)  # taken: then this one only loses nodes, and needs no name
        if owned.owners:
            self.worth.relist(owned)
        else:
            self.worth.strike(owned)
        self._rank(owned)

    def _rank(self, owned: OwnerSet) -> None:
        """Retired or not; scores are left to `worth.rescore`."""
        live = self.worth.active(owned.popular) if owned.popular else bool(owned.owners)
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

    def check_invariants(self) -> None:
        """Raises AssertionError with what is wrong; O(sets x owners)."""
        runs = list(self.runs.values())
        assert set(self.runs).isdisjoint(self._ended), "a run is active and ended"
        assert {run.serial: run for run in runs} == self._by_serial
        uses = {use for run in runs for use in run.uses.values()}
        for owned in self._all:
            assert owned is self.nobody or owned.nodes > 0, f"nobody needs {owned.key}"
            assert [use.run.serial for use in owned.uses] == [owner[0] for owner in owned.owners]
            assert uses.issuperset(owned.uses), f"{owned.key} is owned by a run that has ended"
            assert all(owned in use.sets for use in owned.uses)
            assert len(owned.owners) <= self.options.max_owners
        assert all(use.sets or use.key == EVERYTHING for use in uses), "a use without a set"
        assert all(owned in self._all for use in uses for owned in use.sets)
        assert len(self._ended) <= self.options.max_ended and len(runs) <= self.options.max_runs
        self.worth.check_invariants(runs, list(self._all))

"""What owner sets are worth: one row of weights a use, one row of discounts a run, one sum a set, all in arrays.

`Score` (core.scores) gives both factors. Weights change with a run's forecast, discounts with the clock, sums with
either; nothing is done per node, and nothing per set in Python. All of it waits until somebody asks for a victim, so
that hints cost next to nothing while there is no memory pressure. Sums are made in the order of the pairs, which is
the order of events: every rank that saw the same events gets the same floats.
"""

import numpy as np
import numpy.typing as npt

from pbkv_ray.core.forecast import Array, Forecast
from pbkv_ray.core.ghost import LearnedReuse
from pbkv_ray.core.ownership import EVERY_WORKFLOW, EVERYTHING, OwnerSet, OwnersOptions, Run, Use, UseKey
from pbkv_ray.core.rates import certain
from pbkv_ray.core.scores import Clock, Outlook, Score, Uses
from pbkv_ray.core.tables import Rows, room
from pbkv_ray.core.waits import ELAPSED_S, WaitingTimes

_PRESSURE_S = 1.0  # a victim was asked for so lately: another will be
_OTHERS = "\0others"  # stands for the agents beyond `max_agents`


class Worth:
    """Scores of the sets that have owners. `first[tier][slot]` is kept by core.order: the recency of the set's oldest
    evictable node, infinite if there is none. Row 0 of every table stands for nobody."""

    def __init__(self, score: Score, learned: LearnedReuse, waits: WaitingTimes, options: OwnersOptions) -> None:
        self.score = score
        self.learned = learned
        self.waits = waits
        self._max_agents, self._max_age_s, self._rescore_s = options.max_agents, options.max_age_s, options.rescore_s
        self._runs, self._uses, self._sets = Rows(), Rows(), Rows()
        self._called_s: Array = np.zeros(16)
        self._since_s: Array = np.zeros(16)
        self._after_s: Array = np.zeros(16)
        self._made_s: Array = np.full(16, -np.inf)
        self._mean_s: Array = np.ones(16)
        self._curve: Array = np.ones((16, len(ELAPSED_S)))
        self._start_s: Array = np.zeros((16, score.horizon))
        self._waiting_s: Array = np.full(16, np.inf)  # since when a call is queued; infinite: none is
        self._weights: Array = np.zeros((64, score.horizon))
        self._use_run: npt.NDArray[np.intp] = np.zeros(64, np.intp)
        self._scores: Array = np.zeros(64)
        self.first: list[Array] = [np.full(64, np.inf), np.full(64, np.inf)]
        self._by_slot: dict[int, OwnerSet] = {}
        self._pair_set: npt.NDArray[np.intp] = np.zeros(256, np.intp)
        self._pair_use: npt.NDArray[np.intp] = np.zeros(256, np.intp)
        self._pairs = self._pairs_live = 0
        self._popular: dict[OwnerSet, None] = {}
        self._everything: dict[str, dict[Run, Use]] = {EVERY_WORKFLOW: {}}  # workflow -> active runs
        self._unweighed: dict[Run, None] = {}
        self._stale = False
        self._scored_s = -np.inf
        self._void_s = np.inf  # when the next forecast ages out

    # Runs

    def open(self, run: Run) -> None:
        slot = run.slot = self._runs.take()
        for name in ("_called_s", "_since_s", "_after_s", "_made_s", "_mean_s", "_curve", "_start_s", "_waiting_s"):
            setattr(self, name, room(getattr(self, name), slot))
        self._made_s[slot], self._start_s[slot], self._waiting_s[slot] = -np.inf, 0.0, np.inf
        use = self.use(run, EVERYTHING)
        self._everything[EVERY_WORKFLOW][run] = use
        self._everything.setdefault(run.workflow, {})[run] = use
        self.called(run)

    def close(self, run: Run) -> None:
        """No set has a use of the run any more."""
        self._unweighed.pop(run, None)
        self.drop(run.uses[EVERYTHING])
        self._made_s[run.slot] = -np.inf
        self._runs.give(run.slot)
        del self._everything[EVERY_WORKFLOW][run]
        flow = self._everything[run.workflow]
        del flow[run]
        if not flow:
            del self._everything[run.workflow]
        self._stale = True

    def name(self, run: Run, workflow: str) -> None:
        """The workflow of a run that was not known so far."""
        use = self._everything[run.workflow].pop(run)
        run.workflow = workflow
        self._everything.setdefault(workflow, {})[run] = use
        self._stale = True

    def active(self, workflow: str) -> bool:
        return bool(self._everything.get(workflow))

    def called(self, run: Run) -> None:
        """The run's latest call, or the run itself, began at `run.called_s`: its wait starts anew."""
        waits, flow, agent = self.waits, run.workflow, run.current or ""
        curve, mean_s = waits.curve(flow, agent)
        idle_s = 0.0
        if waits.answers:
            idle_s = 1.0 / float(waits.curve(flow, agent, "idle")[0][0])
            curve, _ = waits.curve(flow, agent, "answer")
        slot = run.slot
        self._called_s[slot], self._mean_s[slot] = run.called_s, mean_s
        self._since_s[slot], self._curve[slot], self._after_s[slot] = run.called_s, curve, idle_s
        if run.forecast is not None:
            self.look(run)

    def answered(self, run: Run) -> None:
        """The run's latest call ended at `run.answered_s`: what is left is its tool's time."""
        if run.answered_s is not None:
            curve, _ = self.waits.curve(run.workflow, run.current or "", "idle")
            self._since_s[run.slot], self._curve[run.slot], self._after_s[run.slot] = run.answered_s, curve, 0.0
            self._stale = True

    def look(self, run: Run) -> None:
        """The run's forecast or its current agent has changed."""
        run.outlook = None
        self._unweighed[run] = None
        self._made_s[run.slot] = run.made_s
        self._waiting_s[run.slot] = np.inf if run.waiting is None else run.waiting_s
        self._void_s = min(self._void_s, run.made_s + self._max_age_s)
        self._stale = True

    # Uses

    def use(self, run: Run, key: UseKey) -> Use:
        known = run.uses.get(key)
        if known is None:
            slot = self._uses.take()
            self._weights, self._use_run = room(self._weights, slot), room(self._use_run, slot)
            self._weights[slot], self._use_run[slot] = 0.0, run.slot
            known = run.uses[key] = Use(run, key, slot)
            run.unweighed.append(known)
            self._unweighed[run] = None
        return known

    def drop(self, use: Use) -> None:
        del use.run.uses[use.key]
        self._weights[use.slot], self._use_run[use.slot] = 0.0, 0
        self._uses.give(use.slot)

    # Sets

    def enlist(self, owned: OwnerSet) -> None:
        """The set has owners (or is popular): it gets a score."""
        slot = owned.slot = self._sets.take()
        self._scores = room(self._scores, slot)
        self.first = [room(first, slot) for first in self.first]
        for first in self.first:
            first[slot] = np.inf
        self._by_slot[slot] = owned
        if owned.popular:
            self._popular[owned] = None
        self._add_pairs(owned)

    def relist(self, owned: OwnerSet) -> None:
        """Its uses have changed."""
        self._drop_pairs(owned)
        self._add_pairs(owned)

    def strike(self, owned: OwnerSet) -> None:
        """It has no owner left, or no node."""
        if owned.slot:
            self._drop_pairs(owned)
            self._popular.pop(owned, None)
            del self._by_slot[owned.slot]
            self._sets.give(owned.slot)
            self._scores[owned.slot] = 0.0
            for first in self.first:
                first[owned.slot] = np.inf
            owned.slot = 0

    def of(self, owned: OwnerSet) -> float:
        """Score of its nodes (paper Eq. 2 or the policy's own), as of the last `rescore`."""
        return float(self._scores[owned.slot])

    def next_call(self, owned: OwnerSet, now_s: float) -> float:
        """Paper Eq. 1: what the next calls of the owners are expected to use of its nodes. After `rescore`."""
        uses = self._everything.get(owned.popular, {}).values() if owned.popular else owned.uses
        young = now_s - self._max_age_s
        return float(sum(self._weights[use.slot, 0] for use in uses if self._made_s[use.run.slot] > young))

    def lowest(self, tier: int) -> OwnerSet | None:
        """Of the sets of positive score with an evictable node: the one whose oldest node goes first."""
        high = self._sets.high
        first, scores = self.first[tier][:high], self._scores[:high]
        worth = np.where((scores > 0) & (first < np.inf), scores, np.inf)
        least = worth.min()
        if least == np.inf:
            return None
        return self._by_slot[int(np.where(worth == least, first, np.inf).argmin())]

    def prepare(self, now_s: float) -> None:
        """A forecast came. Under memory pressure its weights are made now, so that the next victim need not wait."""
        if now_s - self._scored_s <= _PRESSURE_S:
            self._settle()

    def _settle(self) -> None:
        for run in self._unweighed:
            if run.forecast is not None:
                self._weigh(run, run.forecast)
        self._unweighed.clear()

    def rescore(self, now_s: float) -> list[OwnerSet]:
        """Brings scores up to date; returns the sets that became, or ceased to be, worth nothing."""
        moved = self.score.timed and now_s - self._scored_s >= self._rescore_s and now_s != self._scored_s
        if not (self._stale or moved or now_s >= self._void_s):
            return []
        self._settle()
        shares = self._shares(now_s)
        sets, uses = self._pair_set[: self._pairs], self._pair_use[: self._pairs]
        scores: Array = np.zeros(self._sets.high)
        if self.score.combine == "sum":
            scores += np.bincount(sets, shares[uses], minlength=len(scores))
        else:
            np.maximum.at(scores, sets, shares[uses])
        scores[0] = 0.0
        for owned in self._popular:
            uses_of = self._everything.get(owned.popular, {})
            scores[owned.slot] = sum(shares[use.slot] for use in uses_of.values())
        crossed = (scores > 0) != (self._scores[: len(scores)] > 0)
        self._scores[: len(scores)] = scores
        self._stale, self._scored_s = False, now_s
        return [self._by_slot[slot] for slot in np.flatnonzero(crossed).tolist()]

    def _shares(self, now_s: float) -> Array:
        """[uses]: what each is worth now; zero once its forecast has aged out."""
        n, m = self._runs.high, self._uses.high
        tables = (
            self._called_s,
            self._since_s,
            self._curve,
            self._after_s,
            self._mean_s,
            self._start_s,
            self._waiting_s,
        )
        clock = Clock(*(table[:n] for table in tables))
        void_s = self._made_s[:n] + self._max_age_s
        live = void_s > now_s
        self._void_s = float(void_s[live].min(initial=np.inf))
        discounts = self.score.discounts(now_s, clock) * live[:, None]
        return np.asarray(np.einsum("uk,uk->u", self._weights[:m], discounts[self._use_run[:m]]))

    def _weigh(self, run: Run, forecast: Forecast) -> None:
        """Weights of the uses that have none yet; of all of them after a new forecast or call."""
        if run.outlook is None:
            run.outlook = self._outlook(run, forecast)
            run.unweighed = list(run.uses.values())
            self._start_s[run.slot] = self._starts(run, forecast)
        uses = [use for use in run.unweighed if run.uses.get(use.key) is use]
        run.unweighed = []
        if uses:
            bits = np.arange(run.outlook.agent.shape[1], dtype=np.uint64)
            masks = np.array([use.key[:3] for use in uses], np.uint64)
            known = (masks[:, :, None] >> bits & np.uint64(1)) > 0
            shared, depth = (np.array(column) for column in list(zip(*(use.key for use in uses), strict=True))[3:])
            kinds = Uses(known[:, 0], known[:, 1], known[:, 2], shared, depth)
            self._weights[[use.slot for use in uses]] = self.score.weights(run.outlook, kinds)

    def _outlook(self, run: Run, forecast: Forecast) -> Outlook:
        names = list(run.agents)
        if len(names) >= self._max_agents - 1:
            names.append(_OTHERS)
        agent = np.zeros((len(forecast.step), max(1, len(names))))
        for column, name in enumerate(forecast.agents):
            agent[:, run.agents.get(name, len(names) - 1)] += forecast.step[:, column]
        rates = (
            self.learned.rates(run.workflow, names, run.path, run.run_id)
            if self.score.learns
            else certain(len(agent[0]))
        )
        current = None if run.current is None else run.agents.get(run.current, len(names) - 1)
        end = forecast.step[:, -1]
        if run.waiting is not None:  # the call that the forecast comes after has yet to be served
            first = np.zeros((1, agent.shape[1]))
            first[0, run.agents.get(run.waiting, len(names) - 1)] = 1.0
            agent, end = np.concatenate((first, agent)), np.concatenate(([0.0], end))
        return Outlook(agent, end, current, rates)

    def _starts(self, run: Run, forecast: Forecast) -> Array:
        """[horizon] when the calls are expected to start, on the broadcast clock, not falling."""
        steps = np.arange(self.score.horizon)
        if forecast.wait_s is None:
            _, usual_s = self.waits.curve(run.workflow, "")
            return np.asarray(run.called_s + self._mean_s[run.slot] + steps * usual_s)
        start = np.maximum.accumulate(run.made_s + np.maximum(0.0, forecast.wait_s))
        if run.waiting is not None:
            start = np.concatenate(([run.made_s], start))
        return np.asarray(start[np.minimum(steps, len(start) - 1)])

    # Pairs of (set, use): what one pass sums up.

    def _add_pairs(self, owned: OwnerSet) -> None:
        if self._pairs > 2 * self._pairs_live + 256:
            self._pairs = self._pairs_live = 0
            for other in self._by_slot.values():
                if other is not owned:
                    self._write_pairs(other)
        self._write_pairs(owned)
        self._stale = True

    def _write_pairs(self, owned: OwnerSet) -> None:
        start, end = self._pairs, self._pairs + len(owned.uses)
        self._pair_set, self._pair_use = room(self._pair_set, end), room(self._pair_use, end)
        self._pair_set[start:end] = owned.slot
        self._pair_use[start:end] = [use.slot for use in owned.uses]
        owned.span, self._pairs, self._pairs_live = (start, end), end, self._pairs_live + end - start

    def _drop_pairs(self, owned: OwnerSet) -> None:
        start, end = owned.span
        self._pair_set[start:end] = self._pair_use[start:end] = 0
        owned.span, self._pairs_live = (0, 0), self._pairs_live - (end - start)
        self._stale = True

    def check_invariants(self, runs: list[Run], sets: list[OwnerSet]) -> None:
        """Raises AssertionError with what is wrong; `runs` and `sets` are all that are active, and all there are."""
        uses = [use for run in runs for use in run.uses.values()]
        for rows, held in ((self._runs, runs), (self._uses, uses), (self._sets, list(self._by_slot))):
            assert rows.taken == len(held), f"{rows.taken} rows taken, {len(held)} needed"
        assert len({use.slot for use in uses}) == len(uses), "two uses share a row"
        assert set(self._by_slot.values()) == {owned for owned in sets if owned.slot}
        assert self._pairs_live == sum(len(owned.uses) for owned in self._by_slot.values())
        for owned in sets:
            assert (owned.slot > 0) == bool(owned.owners or owned.popular), f"{owned.key} has no score"
            start, end = owned.span
            assert (self._pair_set[start:end] == owned.slot).all()
            assert self._pair_use[start:end].tolist() == [use.slot for use in owned.uses]
        named = sorted(run.serial for flow, of in self._everything.items() if flow != EVERY_WORKFLOW for run in of)
        assert named == sorted(run.serial for run in runs)
        assert list(self._everything[EVERY_WORKFLOW]) == sorted(runs, key=lambda run: run.serial)

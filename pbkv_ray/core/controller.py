"""The controller's core: events in, actions out, one door.

Rule 1: everything that changes the controller's state goes through `handle`; `receive` only removes duplicates first.
Rule 2: this file knows no clock, no Ray and no engine. Time is `at_s` of the events; Tick drives what expires.
Rule 3: events may be late, doubled or lost, from sources whose clocks differ a little. None of that raises; what was
ignored is counted in `counts`.

The controller joins two views of a run: LangGraph's callback tells of agents entered and left, the LLM client of
calls. A call moves the path on: it teaches the predictor what followed, and brings a new forecast. What engines and
routers read is only ever derived from this state, so a controller that restarts empty is wrong about nothing, it
merely knows less until events and reports have come in again.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, get_args

import numpy as np

from pbkv_ray.config import ControllerOptions
from pbkv_ray.core.actions import Action, PublishForecast, RetireRun
from pbkv_ray.core.allowance import Allowance
from pbkv_ray.core.events import (
    AgentEntered,
    AgentLeft,
    Batch,
    CallFinished,
    CallStarted,
    CallState,
    Event,
    Outcome,
    Reforecast,
    ReplicaJoined,
    ReplicaLeft,
    Residency,
    RunEnded,
    RunStarted,
    Tick,
    ToolWaiting,
)
from pbkv_ray.core.forecast import Guarded, Predictor
from pbkv_ray.core.runs import Run, RunTable

MAX_SOURCES = 4_096
_NAMES = {  # what clients may choose of an event, beside its run
    kind: tuple({"agent", "workflow", "call_id", "name"} & set(kind.__slots__)) for kind in get_args(Event)
}
NEWS = 0.02  # a forecast that moves by less at its first step is not told again
RESEND_S = 30.0  # an engine that has not heard of an ending by then hears it again


@dataclass(slots=True)
class Replica:
    """`tokens` maps runs to (device tokens, host tokens), as last reported under `epoch`.

    `strangers` are those of them that nobody has told us of, with when they were first reported.
    """

    epoch: str
    seen_s: float
    tokens: dict[str, tuple[int, int]]
    queued_prefill_tokens: int = 0
    strangers: dict[str, float] = field(default_factory=dict)


class Controller:
    def __init__(self, options: ControllerOptions, predictor: Predictor) -> None:
        self._options = options
        self.counts: Counter[str] = Counter()
        self._predictor = Guarded(predictor, self.counts)
        self.listeners: list[Callable[[Event], None]] = []  # told of every event that is new, once it is handled
        self._sources: OrderedDict[str, tuple[int, int]] = OrderedDict()  # -> sequence expected next, dropped so far
        self._due: dict[str, float] = {}  # runs that have called, and when: their forecast is due
        self._learning = Allowance(options.max_learned_per_s)  # calls that may be learned from
        self._answers = Allowance(options.max_learned_per_s)  # answers that may change a forecast
        self.runs = RunTable(options)
        self.replicas: dict[str, Replica] = {}
        self._handlers: dict[type, Callable[[Any], list[Action]]] = {
            RunStarted: self._run_started,
            AgentEntered: self._agent_entered,
            AgentLeft: self._agent_left,
            ToolWaiting: self._tool_waiting,
            CallStarted: self._call_started,
            CallFinished: self._call_finished,
            CallState: lambda event: [],
            Reforecast: self._reforecast,
            RunEnded: self._run_ended,
            ReplicaJoined: self._replica_joined,
            ReplicaLeft: self._replica_left,
            Residency: self._residency,
            Tick: self._tick,
        }

    def receive(self, batch: Batch) -> list[Action]:
        """Handle what of `batch` is new: a batch that was sent again may overlap what came before."""
        expected, dropped = self._sources.pop(batch.source, (batch.sequence, 0))
        skip = max(0, expected - batch.sequence)
        self._sources[batch.source] = (
            max(expected, batch.sequence + len(batch.events)),
            max(dropped, batch.dropped),
        )
        while len(self._sources) > MAX_SOURCES:
            self._sources.popitem(last=False)
        self.counts["events_duplicate"] += min(skip, len(batch.events))
        self.counts["events_lost"] += max(0, batch.dropped - dropped)
        return self.handle(*batch.events[skip:])

    def handle(self, *events: Event) -> list[Action]:
        """Take the events in order; what is to be done about them, in order. Total: raises for no event."""
        actions: list[Action] = []
        for event in events:
            self.counts["events"] += 1
            run_id = getattr(event, "run_id", None)
            if run_id is not None and not self._acceptable(run_id, event):
                continue
            actions += self._handlers[type(event)](event)
            for listener in self.listeners:
                try:
                    listener(event)
                except Exception:
                    self.counts["listener_errors"] += 1
        for run in self.runs.overflow():
            self.counts["runs_displaced"] += 1
            actions += self._end(run.run_id, "expired", run.seen_s)
        return actions + self._forecasts()

    def knows_of(self, run_id: str) -> bool:
        """Whether calls may be made in the name of the run: its id is one, and it has not ended."""
        return 0 < len(run_id) <= self._options.max_id_length and self.runs.outcome(run_id) is None

    def _acceptable(self, run_id: str, event: Event) -> bool:
        longest = len(run_id)
        for name in _NAMES[type(event)]:
            longest = max(longest, len(getattr(event, name)))
        if not run_id or longest > self._options.max_id_length:
            self.counts["events_refused"] += 1
            return False
        if self.runs.outcome(run_id) is not None:
            self.counts["events_late"] += 1
            return False
        return True

    # The life cycle, as LangGraph's callback sees it.

    def _run_started(self, event: RunStarted) -> list[Action]:
        if self.runs.get(event.run_id) is None:
            self.counts["runs_started"] += 1
        run = self.runs.touch(event.run_id, event.at_s)
        run.workflow = event.workflow
        run.agents, run.edges = event.agents[: self._options.max_agents_per_run], event.edges
        run.parent_run_id = event.parent_run_id
        if event.agents:
            self._predictor.prior(event.workflow, run.agents, event.edges)
        return []

    def _agent_entered(self, event: AgentEntered) -> list[Action]:
        run = self.runs.touch(event.run_id, event.at_s)
        run.waiting_for = None
        if len(run.entered) < self._options.max_agents_per_run:
            run.entered.append((event.agent, event.step))
        return []

    def _agent_left(self, event: AgentLeft) -> list[Action]:
        run = self.runs.touch(event.run_id, event.at_s)
        if (event.agent, event.step) in run.entered:
            run.entered.remove((event.agent, event.step))
        return []

    def _tool_waiting(self, event: ToolWaiting) -> list[Action]:
        self.runs.touch(event.run_id, event.at_s).waiting_for = event.name
        return []

    def _run_ended(self, event: RunEnded) -> list[Action]:
        return self._end(event.run_id, event.outcome, event.at_s)

    def _end(self, run_id: str, outcome: Outcome, at_s: float) -> list[Action]:
        run = self.runs.end(run_id, outcome, at_s)
        self.counts[f"runs_{outcome}"] += 1
        if run is not None and outcome == "completed" and run.history and self._may_learn(at_s):
            self._predictor.observe(run.workflow, tuple(run.history), None, run_id, run.answers)
        # Also when the run was unknown: an engine may still hold its nodes from before a restart.
        return [RetireRun(run_id, at_s)]

    # Calls, as the LLM client sees them.

    def _call_started(self, event: CallStarted) -> list[Action]:
        run = self.runs.touch(event.run_id, event.at_s)
        run.waiting_for = None
        if len(run.calls) < self._options.max_agents_per_run:
            run.calls[event.call_id] = event.agent, event.step
        self.counts["calls_started"] += 1
        if self._may_learn(event.at_s):
            self._predictor.observe(run.workflow, tuple(run.history), event.agent, run.run_id, run.answers)
            if run.called_s is not None:
                waited_s = max(0.0, event.at_s - run.called_s)
                self._predictor.observe_wait(run.workflow, run.history[-1], event.agent, waited_s)
        run.history.append(event.agent)
        run.answers.append(None)
        run.called_s, run.newest, run.begun = event.at_s, event.call_id, None
        self._due[run.run_id] = event.at_s
        return []

    def _call_finished(self, event: CallFinished) -> list[Action]:
        run = self.runs.touch(event.run_id, event.at_s)
        run.calls.pop(event.call_id, None)
        run.home = event.replica or run.home
        totals = run.totals
        totals.calls += 1
        totals.aborted += event.reason in ("abort", "error")
        totals.prompt_tokens += event.prompt_tokens
        totals.output_tokens += event.output_tokens
        totals.device_cached_tokens += event.device_cached_tokens
        totals.host_cached_tokens += event.host_cached_tokens
        totals.seconds += event.seconds
        self.counts["calls_finished"] += 1
        self.counts["prompt_tokens"] += event.prompt_tokens
        self.counts["output_tokens"] += event.output_tokens
        self.counts["device_cached_tokens"] += event.device_cached_tokens
        self.counts["host_cached_tokens"] += event.host_cached_tokens
        if event.call_id != run.newest or event.reason not in ("stop", "length"):
            return []
        return self._answered(run, event.output_tokens, event.at_s)

    def _answered(self, run: Run, tokens: int, at_s: float) -> list[Action]:
        """The run's newest call has got its answer: how long that was says more about what comes next."""
        run.answers[-1] = tokens
        if run.begun is None or run.called_s is None:
            return []  # its forecast is yet to be made
        if not self._answers.take(at_s):
            self.counts["answers_not_heeded"] += 1
            return []
        better = self._predictor.refined(run.workflow, run.history[-1], tokens, run.begun)
        if np.abs(better.step[0] - run.begun.step[0]).max() < NEWS:
            return []
        run.version += 1
        return [PublishForecast(run.run_id, run.version, better, run.called_s)]

    def _may_learn(self, at_s: float) -> bool:
        """Learning costs more than all the rest. Beyond so many calls a second the others say nothing new."""
        may = self._learning.take(at_s)
        self.counts["calls_not_learned"] += not may
        return may

    def _forecasts(self) -> list[Action]:
        """Of the runs that have called since the last time: one each, many of a workflow at once."""
        due, self._due = self._due, {}
        groups: dict[str, list[tuple[Run, float]]] = {}
        for run_id, at_s in due.items():
            if (run := self.runs.get(run_id)) is not None:
                groups.setdefault(run.workflow, []).append((run, at_s))
        actions: list[Action] = []
        for workflow, calling in groups.items():
            histories = [tuple(run.history) for run, _ in calling]
            made = self._predictor.forecasts(workflow, histories, self._options.horizon)
            for (run, at_s), forecast in zip(calling, made, strict=True):
                if forecast is None:
                    self.counts["forecasts_missing"] += 1
                    continue
                run.begun = forecast
                if (tokens := run.answers[-1]) is not None:  # it has been answered in the same batch
                    forecast = self._predictor.refined(workflow, run.history[-1], tokens, forecast)
                run.version += 1
                actions.append(PublishForecast(run.run_id, run.version, forecast, at_s))
        return actions

    def _reforecast(self, event: Reforecast) -> list[Action]:
        run = self.runs.get(event.run_id)
        if run is None or len(run.history) != event.calls or (run.answers[-1] is not None and not event.answered):
            self.counts["forecasts_late"] += 1
            return []
        self._due.pop(event.run_id, None)  # this one knows more than what would be published now
        run.version += 1
        return [PublishForecast(run.run_id, run.version, event.forecast, event.at_s)]

    # Replicas.

    def _replica_joined(self, event: ReplicaJoined) -> list[Action]:
        known = self.replicas.get(event.replica)
        if known is not None and known.epoch == event.epoch:
            known.seen_s = max(known.seen_s, event.at_s)
            return []
        if known is not None:
            self._leave_homes(event.replica)
        self.replicas[event.replica] = Replica(event.epoch, event.at_s, {})
        return []

    def _replica_left(self, event: ReplicaLeft) -> list[Action]:
        if self.replicas.pop(event.replica, None) is not None:
            self._leave_homes(event.replica)
        return []

    def _leave_homes(self, replica: str) -> None:
        for run in self.runs:
            if run.home == replica:
                run.home = None

    def _residency(self, event: Residency) -> list[Action]:
        """Only an engine that has joined under this very epoch holds what it says."""
        known = self.replicas.get(event.replica)
        if known is None or known.epoch != event.epoch:
            self.counts["residency_refused"] += 1
            return []
        known.seen_s = max(known.seen_s, event.at_s)
        known.tokens = event.tokens
        known.queued_prefill_tokens = event.queued_prefill_tokens
        return self._reconcile(known, event.at_s)

    def _reconcile(self, replica: Replica, now_s: float) -> list[Action]:
        """Runs that the engine takes for active and that have ended: the ending was lost, or the whole run was, with
        the controller that knew it. Whoever is alive names its runs well within a lease."""
        limit_s = now_s - self._options.lease_s
        gone: list[str] = []
        strangers: dict[str, float] = {}
        for run_id in replica.tokens:
            if self.runs.get(run_id) is not None:
                continue
            if (ended_s := self.runs.ended_s(run_id)) is not None:
                if ended_s < now_s - RESEND_S:
                    gone.append(run_id)
                continue
            strangers[run_id] = since_s = replica.strangers.get(run_id, now_s)
            if since_s < limit_s:
                gone.append(run_id)
        replica.strangers = strangers
        self.counts["endings_repeated"] += len(gone)
        return [RetireRun(run_id, now_s) for run_id in gone]

    # Time.

    def _tick(self, event: Tick) -> list[Action]:
        actions: list[Action] = []
        for run in self.runs.expired(event.at_s):
            actions += self._end(run.run_id, "expired", event.at_s)
        self.runs.forget(event.at_s)
        return actions

"""One run told event by event; what the controller answers is asserted whole."""

from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from pbkv_ray.config import ControllerOptions
from pbkv_ray.core.actions import Action, PublishForecast, RetireRun
from pbkv_ray.core.controller import Controller
from pbkv_ray.core.events import (
    AgentEntered,
    AgentLeft,
    Batch,
    CallFinished,
    CallStarted,
    Event,
    ReplicaJoined,
    ReplicaLeft,
    Residency,
    RunEnded,
    RunStarted,
    Tick,
    ToolWaiting,
)
from pbkv_ray.core.forecast import Forecast
from pbkv_ray.core.runs import Totals


class FakePredictor:
    """Remembers what it was taught; always forecasts the coder, then the end."""

    def __init__(self) -> None:
        self.taught: list[tuple[str, tuple[str, ...], str | None]] = []
        self.forecast_made = Forecast(("coder",), np.array([[1.0, 0.0], [0.0, 1.0]]))

        self.graphs: list[tuple[str, tuple[str, ...], tuple[tuple[str, str], ...]]] = []
        self.waits: list[tuple[str, str, str, float]] = []
        self.answers: list[tuple[tuple[str, ...], tuple[int | None, ...], str | None]] = []

    def prior(self, workflow, agents, edges):
        self.graphs.append((workflow, tuple(agents), tuple(edges)))

    def observe_wait(self, workflow, agent, following, seconds):
        self.waits.append((workflow, agent, following, seconds))

    def observe(self, workflow, history, following, run_id="", answers=()):
        self.taught.append((workflow, tuple(history), following))
        self.answers.append((tuple(history), tuple(answers), following))

    def refined(self, workflow, agent, tokens, forecast):
        return replace(forecast, step=forecast.step[::-1]) if tokens > 100 else forecast

    def forecast(self, workflow, history, horizon):
        return self.forecast_made if workflow == "swe" else None


def make_controller(**options) -> tuple[Controller, FakePredictor]:
    predictor = FakePredictor()
    return Controller(ControllerOptions(**options), predictor), predictor


def test_a_run_from_its_start_to_its_end():
    controller, predictor = make_controller()
    swe = RunStarted("r1", "swe", 1.0, ("planner", "coder"), (("planner", "coder"),))

    assert controller.handle(swe, AgentEntered("r1", "planner", 1, 1.1)) == []
    # The first call teaches what runs start with, and brings the first forecast.
    assert controller.handle(CallStarted("r1", "planner", 1, "c1", 1.2)) == [
        PublishForecast("r1", 1, predictor.forecast_made, 1.2)
    ]
    finished = CallFinished("r1", "planner", 1, "c1", 2.0, "stop", 100, 20, 60, 10, 0.8, "replica-a")
    assert controller.handle(finished, AgentLeft("r1", "planner", 1, 2.1)) == []
    # A graph node that calls no LLM: the run waits for a tool.
    assert controller.handle(ToolWaiting("r1", "tester", 2, 2.2)) == []
    run = controller.runs.get("r1")
    assert run is not None
    assert (run.waiting_for, run.home, run.entered, run.calls) == ("tester", "replica-a", [], {})
    assert run.totals == Totals(1, 0, 100, 20, 60, 10, 0.8)

    assert controller.handle(CallStarted("r1", "coder", 3, "c2", 3.0)) == [
        PublishForecast("r1", 2, predictor.forecast_made, 3.0)
    ]
    assert controller.handle(RunEnded("r1", "completed", 4.0)) == [RetireRun("r1", 4.0)]
    assert predictor.taught == [
        ("swe", (), "planner"),
        ("swe", ("planner",), "coder"),
        ("swe", ("planner", "coder"), None),
    ]
    assert predictor.graphs == [("swe", ("planner", "coder"), (("planner", "coder"),))]
    assert predictor.waits == [("swe", "planner", "coder", 3.0 - 1.2)]
    assert controller.runs.outcome("r1") == "completed"


def test_a_call_that_finishes_after_the_end_does_not_resurrect_the_run():
    controller, predictor = make_controller()
    controller.handle(RunStarted("r1", "swe", 1.0), CallStarted("r1", "coder", 1, "c1", 1.0))
    assert controller.handle(RunEnded("r1", "cancelled", 2.0)) == [RetireRun("r1", 2.0)]
    late = CallFinished("r1", "coder", 1, "c1", 2.5, "abort")
    assert controller.handle(late, RunEnded("r1", "failed", 2.6)) == []
    assert (len(controller.runs), controller.runs.outcome("r1")) == (0, "cancelled")
    assert controller.counts["events_late"] == 2
    # A run that was cut off says nothing about how runs end.
    assert ("swe", ("coder",), None) not in predictor.taught


def test_a_silent_run_ends_when_its_lease_runs_out():
    controller, _ = make_controller(lease_s=10.0, ended_memory_s=5.0)
    controller.handle(RunStarted("old", "swe", 0.0), RunStarted("young", "swe", 5.0))
    assert controller.handle(Tick(9.9)) == []
    controller.handle(RunStarted("old", "swe", 9.9))  # the runner repeats it: alive
    assert controller.handle(Tick(15.1)) == [RetireRun("young", 15.1)]
    assert controller.handle(Tick(20.0)) == [RetireRun("old", 20.0)]
    controller.handle(Tick(30.0))
    assert (controller.runs.outcome("young"), controller.runs.outcome("old")) == (None, None)


def test_an_unknown_run_is_adopted_and_an_unknown_end_still_retires():
    controller, _ = make_controller()
    assert controller.handle(CallStarted("r9", "coder", 4, "c", 1.0)) == []  # no workflow yet: no forecast
    assert controller.handle(RunStarted("r9", "swe", 1.5)) == []
    assert [type(a) for a in controller.handle(CallStarted("r9", "coder", 5, "d", 2.0))] == [PublishForecast]
    assert controller.handle(RunEnded("never-seen", "completed", 3.0)) == [RetireRun("never-seen", 3.0)]


def test_batches_that_are_sent_again_are_taken_once():
    controller, _ = make_controller()
    first = Batch("runner-1", 0, (RunStarted("r1", "swe", 1.0), CallStarted("r1", "coder", 1, "c1", 1.0)))
    again = Batch("runner-1", 0, (*first.events, RunEnded("r1", "completed", 2.0)))
    assert [type(a) for a in controller.receive(first)] == [PublishForecast]
    assert controller.receive(again) == [RetireRun("r1", 2.0)]
    assert controller.receive(again) == []
    controller.receive(Batch("runner-1", 10, (), dropped=7))
    controller.receive(Batch("runner-1", 10, (), dropped=7))
    assert (controller.counts["events_duplicate"], controller.counts["events_lost"]) == (2 + 3, 7)


def test_a_source_that_a_restarted_controller_meets_in_the_middle_has_lost_nothing_by_it():
    controller, _ = make_controller()
    assert controller.receive(Batch("runner-1", 500, (RunEnded("r1", "completed", 2.0),))) == [RetireRun("r1", 2.0)]
    assert (controller.counts["events_duplicate"], controller.counts["events_lost"]) == (0, 0)


def test_a_replica_that_leaves_is_no_home_and_one_that_comes_back_is_empty():
    controller, _ = make_controller()
    controller.handle(
        ReplicaJoined("a", "epoch-1", 0.0),
        Residency("a", "epoch-1", 1.0, {"r1": (500, 100)}),
        RunStarted("r1", "swe", 1.0),
        CallFinished("r1", "coder", 1, "c1", 1.0, "stop", replica="a"),
    )
    assert controller.replicas["a"].tokens == {"r1": (500, 100)}
    controller.handle(ReplicaJoined("a", "epoch-2", 2.0))
    assert controller.replicas["a"].tokens == {}
    controller.handle(ReplicaLeft("a", 3.0))
    run = controller.runs.get("r1")
    assert (controller.replicas, run and run.home) == ({}, None)


def test_a_batch_brings_one_forecast_a_run_and_none_for_a_run_that_it_ends():
    controller, predictor = make_controller()
    actions = controller.handle(
        RunStarted("r1", "swe", 1.0),
        RunStarted("r2", "swe", 1.0),
        CallStarted("r1", "coder", 1, "c1", 1.1),
        CallStarted("r2", "coder", 1, "c2", 1.2),
        CallStarted("r1", "tester", 2, "c3", 1.3),
        RunEnded("r2", "completed", 1.4),
    )
    assert actions == [RetireRun("r2", 1.4), PublishForecast("r1", 1, predictor.forecast_made, 1.3)]


def test_beyond_a_rate_calls_teach_nothing_and_are_counted():
    controller, predictor = make_controller(max_learned_per_s=2)
    for n, at_s in enumerate((1.0, 1.1, 1.2, 1.3, 2.0)):
        controller.handle(CallStarted("r1", f"agent {n}", n, f"c{n}", at_s))
    taught = [following for _, _, following in predictor.taught]
    assert (taught, controller.counts["calls_not_learned"]) == (["agent 0", "agent 1", "agent 4"], 2)


def test_the_length_of_an_answer_is_learned_and_changes_what_is_expected():
    controller, predictor = make_controller()
    made, turned = predictor.forecast_made, predictor.forecast_made.step[::-1].tolist()
    controller.handle(RunStarted("r1", "swe", 0.0), CallStarted("r1", "planner", 1, "c1", 1.0))
    assert controller.handle(CallFinished("r1", "planner", 1, "c1", 2.0, "stop", 500, 20)) == []  # it says nothing
    assert controller.handle(CallStarted("r1", "coder", 2, "c2", 3.0)) == [PublishForecast("r1", 2, made, 3.0)]
    (refined,) = controller.handle(CallFinished("r1", "coder", 2, "c2", 4.0, "stop", 600, 900))
    assert (refined.version, refined.at_s, refined.forecast.step.tolist()) == (3, 3.0, turned)
    controller.handle(RunEnded("r1", "completed", 5.0))
    assert predictor.answers == [
        ((), (), "planner"),
        (("planner",), (20,), "coder"),
        (("planner", "coder"), (20, 900), None),
    ]


def test_the_answer_of_an_aborted_call_or_of_one_of_several_at_a_time_changes_nothing():
    controller, predictor = make_controller()
    controller.handle(RunStarted("r1", "swe", 0.0), CallStarted("r1", "a", 1, "c1", 1.0))
    assert controller.handle(CallFinished("r1", "a", 1, "c1", 2.0, "abort", 500, 900)) == []
    controller.handle(CallStarted("r1", "b", 2, "c2", 3.0), CallStarted("r1", "c", 2, "c3", 3.0))
    assert controller.handle(CallFinished("r1", "b", 2, "c2", 4.0, "stop", 500, 900)) == []
    (refined,) = controller.handle(CallFinished("r1", "c", 2, "c3", 5.0, "stop", 500, 901))  # the newest one
    assert refined.version == 3
    controller.handle(RunEnded("r1", "completed", 6.0))
    assert predictor.answers[-1] == (("a", "b", "c"), (None, None, 901), None)


def test_a_call_whose_end_was_lost_does_not_silence_those_that_follow():
    controller, _ = make_controller()
    controller.handle(RunStarted("r1", "swe", 0.0), CallStarted("r1", "a", 1, "lost", 1.0))
    controller.handle(CallStarted("r1", "a", 2, "c2", 3.0))
    (refined,) = controller.handle(CallFinished("r1", "a", 2, "c2", 4.0, "stop", 500, 900))
    assert refined.version == 3


def test_beyond_a_rate_answers_change_nothing_and_are_counted():
    controller, _ = make_controller(max_learned_per_s=2)
    started = [CallStarted(f"r{i}", "a", 1, f"c{i}", 1.0) for i in range(4)]
    controller.handle(*(RunStarted(f"r{i}", "swe", 0.0) for i in range(4)), *started)
    ended = [CallFinished(f"r{i}", "a", 1, f"c{i}", 9.0, "stop", 500, 900) for i in range(4)]
    assert [action.run_id for action in controller.handle(*ended)] == ["r0", "r1"]  # rested since: learning did not
    assert controller.counts["answers_not_heeded"] == 2


def test_an_answer_that_moves_a_forecast_by_next_to_nothing_is_not_told():
    controller, predictor = make_controller()
    predictor.refined = lambda workflow, agent, tokens, forecast: replace(forecast, step=forecast.step * 0.99 + 0.005)
    controller.handle(RunStarted("r1", "swe", 0.0), CallStarted("r1", "a", 1, "c1", 1.0))
    assert controller.handle(CallFinished("r1", "a", 1, "c1", 2.0, "stop", 500, 900)) == []


def test_calls_that_start_and_finish_in_one_batch_bring_one_forecast():
    controller, predictor = make_controller()
    events = CallStarted("r1", "a", 1, "c1", 1.0), CallFinished("r1", "a", 1, "c1", 2.0, "stop", 500, 900)
    (refined,) = controller.handle(RunStarted("r1", "swe", 0.0), *events)
    assert (refined.version, refined.forecast.step.tolist()) == (1, predictor.forecast_made.step[::-1].tolist())
    events = CallStarted("r1", "b", 2, "c2", 3.0), CallFinished("r1", "b", 2, "c2", 4.0, "stop", 500, 20)
    assert controller.handle(*events) == [PublishForecast("r1", 2, predictor.forecast_made, 3.0)]


def test_an_engine_is_credited_only_under_the_epoch_with_which_it_joined():
    controller, _ = make_controller()
    # After a restart of the controller a report may come before the engine has joined again.
    controller.handle(Residency("a", "epoch-1", 1.0, {"r1": (500, 100)}))
    assert controller.replicas == {}
    controller.handle(ReplicaJoined("a", "epoch-1", 2.0), Residency("a", "epoch-1", 3.0, {"r1": (500, 100)}, 40))
    assert (controller.replicas["a"].tokens, controller.replicas["a"].queued_prefill_tokens) == ({"r1": (500, 100)}, 40)
    # The engine starts anew; what its predecessor had still to say counts for nothing, and no run lives there.
    controller.handle(CallFinished("r1", "coder", 1, "c1", 3.5, "stop", replica="a"))
    controller.handle(ReplicaJoined("a", "epoch-2", 4.0), Residency("a", "epoch-1", 5.0, {"r1": (500, 100)}))
    run = controller.runs.get("r1")
    assert (controller.replicas["a"].tokens, run and run.home) == ({}, None)
    assert controller.counts["residency_refused"] == 2


def test_a_replica_that_only_asks_for_hints_is_alive():
    controller, _ = make_controller()
    controller.handle(ReplicaJoined("a", "epoch-1", 1.0), ReplicaJoined("a", "epoch-1", 30.0))
    assert controller.replicas["a"].seen_s == 30.0


def test_an_engine_that_missed_an_ending_hears_it_again():
    controller, _ = make_controller(lease_s=600.0)
    controller.handle(ReplicaJoined("a", "e", 0.0), RunStarted("r1", "swe", 0.0), RunEnded("r1", "completed", 10.0))
    # The hint may be on its way; and a run that lives is nobody's business.
    controller.handle(RunStarted("r2", "swe", 10.0))
    assert controller.handle(Residency("a", "e", 20.0, {"r1": (5, 0), "r2": (5, 0)})) == []
    assert controller.handle(Residency("a", "e", 45.0, {"r1": (5, 0), "r2": (5, 0)})) == [RetireRun("r1", 45.0)]


def test_a_run_that_only_an_engine_knows_is_retired_after_a_lease():
    controller, _ = make_controller(lease_s=60.0)
    controller.handle(ReplicaJoined("a", "e", 0.0))
    assert controller.handle(Residency("a", "e", 0.0, {"lost": (5, 0), "found": (5, 0)})) == []
    controller.handle(RunStarted("found", "swe", 59.0))  # its runner is alive and says so
    assert controller.handle(Residency("a", "e", 61.0, {"lost": (5, 0), "found": (5, 0)})) == [RetireRun("lost", 61.0)]
    assert controller.handle(Residency("a", "e", 62.0, {"found": (5, 0)})) == []


def test_client_chosen_ids_of_any_shape_stay_within_bounds():
    controller, _ = make_controller(max_runs=100)
    ids = [f"{n}-\u2603" for n in range(100_000)] + ["", "x" * 5_000]
    retired = controller.handle(*(RunStarted(run_id, "swe", float(n)) for n, run_id in enumerate(ids)))
    assert len(controller.runs) == 100
    assert len(retired) == 100_000 - 100
    assert (controller.counts["events_refused"], controller.counts["runs_displaced"]) == (2, 99_900)


NAMES = st.one_of(st.text(max_size=5), st.text(min_size=250, max_size=300), st.sampled_from(["a", "\udc80", "\x00"]))


@settings(deadline=None)
@given(st.lists(st.tuples(NAMES, NAMES, NAMES), max_size=30))
def test_names_of_any_shape_are_taken_or_refused_and_kept_short(names: list[tuple[str, str, str]]):
    controller, predictor = make_controller(max_runs=10, max_agents_per_run=3, max_history=4)
    for run_id, agent, call_id in names:
        controller.handle(
            RunStarted(run_id, agent, 1.0, (agent,) * 5),
            AgentEntered(run_id, agent, 1, 1.0),
            ToolWaiting(run_id, agent, 1, 1.0),
            CallStarted(run_id, agent, 1, call_id, 1.0),
        )
    for run in controller.runs:
        assert len(run.history) <= 4 and max(len(run.entered), len(run.calls), len(run.agents)) <= 3
        kept = [run.run_id, run.workflow, run.waiting_for or "", *run.history, *run.calls]
        assert max(map(len, kept)) <= 256
    assert len(controller.runs) <= 10
    assert all(len(workflow) <= 256 for workflow, _, _ in predictor.taught)


RUN_IDS = st.sampled_from(["a", "b", "c"])
TIMES = st.floats(0, 1_000, allow_nan=False)
EVENTS: st.SearchStrategy[Event] = st.one_of(
    st.builds(RunStarted, RUN_IDS, st.sampled_from(["swe", "hover"]), TIMES),
    st.builds(AgentEntered, RUN_IDS, st.sampled_from(["x", "y"]), st.integers(0, 3), TIMES),
    st.builds(AgentLeft, RUN_IDS, st.sampled_from(["x", "y"]), st.integers(0, 3), TIMES),
    st.builds(CallStarted, RUN_IDS, st.sampled_from(["x", "y"]), st.integers(0, 3), st.sampled_from("123"), TIMES),
    st.builds(CallFinished, RUN_IDS, st.just("x"), st.integers(0, 3), st.sampled_from("123"), TIMES, st.just("stop")),
    st.builds(RunEnded, RUN_IDS, st.sampled_from(["completed", "cancelled"]), TIMES),
    st.builds(ToolWaiting, RUN_IDS, st.just("tool"), st.integers(0, 3), TIMES),
    st.builds(Tick, TIMES),
)


@settings(deadline=None)
@given(st.lists(EVENTS, max_size=40))
def test_any_order_of_events_is_taken_and_the_same_log_gives_the_same_actions(events: list[Event]):
    def play() -> list[Action]:
        controller, _ = make_controller(max_runs=2, lease_s=100.0)
        actions = [action for event in events for action in controller.handle(event)]
        assert len(controller.runs) <= 2
        assert not any(controller.runs.outcome(run.run_id) for run in controller.runs)
        return [a if isinstance(a, RetireRun) else (a.run_id, a.version, a.at_s) for a in actions]

    assert play() == play()

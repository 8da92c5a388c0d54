"""Better forecasts that come later, and predictors that fail: the controller goes on."""

import numpy as np

from pbkv_ray.config import ControllerOptions
from pbkv_ray.core.actions import PublishForecast, RetireRun
from pbkv_ray.core.controller import Controller
from pbkv_ray.core.events import CallFinished, CallStarted, CallState, Event, Reforecast, RunEnded, RunStarted
from pbkv_ray.core.forecast import Forecast

COUNTED = Forecast(("coder",), np.array([[0.5, 0.5]]))
COUNTED_AT_END = Forecast(("coder",), np.array([[0.7, 0.3]]))
BETTER = Forecast(("coder",), np.array([[0.9, 0.1]]))
SWE = RunStarted("r1", "swe", 1.0, ("coder",), (("coder", "coder"),))


class FakePredictor:
    def prior(self, workflow, agents, edges): ...

    def observe(self, workflow, history, following, run_id="", answers=()): ...

    def observe_wait(self, workflow, agent, following, seconds): ...

    def refined(self, workflow, agent, tokens, forecast):
        return COUNTED_AT_END

    def forecast(self, workflow, history, horizon):
        return COUNTED


class FakeBrokenPredictor:
    def __getattribute__(self, name):
        def breaks(*arguments):
            raise ZeroDivisionError

        return breaks


def call(number: int) -> CallStarted:
    return CallStarted("r1", "coder", number, f"c{number}", float(number))


def test_a_better_forecast_replaces_the_first_one_unless_it_comes_after_the_next_call():
    controller = Controller(ControllerOptions(), FakePredictor())
    assert controller.handle(SWE, call(2)) == [PublishForecast("r1", 1, COUNTED, 2.0)]
    assert controller.handle(Reforecast("r1", 1, BETTER, 2.5)) == [PublishForecast("r1", 2, BETTER, 2.5)]
    assert controller.handle(call(3)) == [PublishForecast("r1", 3, COUNTED, 3.0)]
    assert controller.handle(Reforecast("r1", 1, BETTER, 3.5)) == []
    assert controller.handle(RunEnded("r1", "completed", 4.0), Reforecast("r1", 2, BETTER, 4.5)) == [
        RetireRun("r1", 4.0)
    ]
    assert (controller.counts["forecasts_late"], controller.counts["events_late"]) == (1, 1)


def test_an_answer_brings_what_counts_make_of_its_length():
    controller = Controller(ControllerOptions(), FakePredictor())
    controller.handle(SWE, call(2))
    answer = CallFinished("r1", "coder", 2, "c2", 2.9, "stop", 100, 20)
    assert controller.handle(answer) == [PublishForecast("r1", 2, COUNTED_AT_END, 2.0)]


def test_a_better_forecast_that_does_not_know_the_answer_comes_too_late_once_it_is_there():
    controller = Controller(ControllerOptions(), FakePredictor())
    controller.handle(SWE, call(2), CallFinished("r1", "coder", 2, "c2", 2.9, "stop", 100, 20))
    assert controller.handle(Reforecast("r1", 1, BETTER, 3.0)) == []
    assert controller.handle(Reforecast("r1", 1, BETTER, 3.1, answered=True)) == [PublishForecast("r1", 2, BETTER, 3.1)]
    assert controller.counts["forecasts_late"] == 1
    assert controller.handle(call(3)) == [PublishForecast("r1", 3, COUNTED, 3.0)]


def test_a_predictor_that_raises_costs_forecasts_and_nothing_else():
    controller = Controller(ControllerOptions(), FakeBrokenPredictor())
    assert controller.handle(SWE, call(2)) == []
    assert controller.handle(call(3)) == []
    assert controller.handle(RunEnded("r1", "completed", 4.0)) == [RetireRun("r1", 4.0)]
    assert controller.runs.outcome("r1") == "completed"
    # The graph, two calls with two forecasts, a wait, the end.
    assert (controller.counts["predictor_errors"], controller.counts["forecasts_missing"]) == (7, 2)


def test_listeners_hear_what_was_accepted_and_one_that_raises_harms_nobody():
    controller = Controller(ControllerOptions(), FakePredictor())
    heard: list[Event] = []

    def breaks(event: Event) -> None:
        raise ZeroDivisionError

    controller.listeners += [breaks, heard.append]
    ended = RunEnded("r1", "completed", 4.0)
    state = CallState("c2", "prefill", np.ones(2, np.float16))
    controller.handle(SWE, state, ended, call(5))  # the last one is late
    assert heard == [SWE, state, ended]
    assert controller.counts["listener_errors"] == 3

"""Replays forecast with the predictor that is asked for."""

import pytest

from pbkv_ray.errors import ConfigError
from pbkv_ray.predict.serving import Served
from pbkv_ray.replay.predictors import predictor_of
from pbkv_ray.replay.workload import TraceCall, TraceRun, Workload

PATHS = ("abc", "abd") * 10


def workload() -> Workload:
    runs = [
        TraceRun(f"r{n}", f"task-{n}", "swe", tuple(TraceCall(agent, 0, 100, 10, ()) for agent in path))
        for n, path in enumerate(PATHS)
    ]
    return Workload("made", tuple(runs), 4)


def after_abc(name: str) -> float:
    """P(x) after a, c, where x always follows b c and never a c, in runs that the predictor has watched."""
    predictor = predictor_of(name, None)()
    for path in ("bcx", "acy") * 20:
        for i in range(len(path) + 1):
            predictor.observe("swe", path[:i], path[i] if i < len(path) else None)
    forecast = predictor.forecast("swe", "ac", 3)
    assert forecast is not None
    return float(forecast.step[0, forecast.agents.index("x")])


def test_order_one_sees_the_last_agent_only():
    assert after_abc("order-1") == pytest.approx(0.5, abs=0.05)
    assert after_abc("order-2") < 0.1
    assert after_abc("counts") < 0.1


def test_a_net_is_trained_on_the_runs_that_may_be_seen_and_starts_in_charge():
    predictor = predictor_of("graphsage", workload())()
    assert isinstance(predictor, Served)
    assert predictor.gates()["swe"].open
    for i in range(4):
        predictor.observe("swe", "abc"[:i], "abc"[i] if i < 3 else None)
    forecast = predictor.forecast("swe", "a", 3)
    assert forecast is not None
    assert forecast.step[0, forecast.agents.index("b")] > 0.9
    assert predictor.counters["forecasts_net"] == 1


def test_what_cannot_be_had_is_said_in_a_sentence():
    with pytest.raises(ConfigError, match="predictor 'oracle' is unknown; known are counts, order-1"):
        predictor_of("oracle", None)
    with pytest.raises(ConfigError, match="needs runs to be trained on; leave out --train none"):
        predictor_of("graphsage", None)

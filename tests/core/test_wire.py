"""What travels between processes arrives as it was, in few bytes."""

import pickle
from dataclasses import FrozenInstanceError

import numpy as np
import pytest

from pbkv_ray.core.actions import PublishForecast, RetireRun
from pbkv_ray.core.events import AgentEntered, Batch, CallFinished, CallStarted, RunEnded, RunStarted
from pbkv_ray.core.forecast import Forecast
from pbkv_ray.core.places import Changes, Place, ReplicaNews
from pbkv_ray.core.routing import Held

EVENTS = (
    RunStarted("r", "swe", 1.0, ("a", "b"), (("a", "b"),), "parent"),
    AgentEntered("r", "a", 1, 1.5),
    CallStarted("r", "a", 1, "c", 2.0),
    CallFinished("r", "a", 1, "c", 3.0, "stop", 100, 10, 50, replica="r0", first_token_s=0.5),
    RunEnded("r", "completed", 4.0),
)


def test_records_arrive_equal_and_stay_frozen():
    sent = Batch("runner", 7, EVENTS, dropped=2), Changes(3, True, {"r": Place("a", held={"a": Held(1, 2)})}, {})
    assert pickle.loads(pickle.dumps(sent)) == sent
    assert pickle.loads(pickle.dumps(ReplicaNews("epoch", 4, draining=True))) == ReplicaNews("epoch", 4, draining=True)
    with pytest.raises(FrozenInstanceError):
        pickle.loads(pickle.dumps(RetireRun("r", 1.0))).run_id = "other"


def test_a_forecast_keeps_its_arrays():
    sent = PublishForecast("r", 3, Forecast(("a",), np.array([[0.25, 0.75]]), np.array([2.0])), 1.0)
    got = pickle.loads(pickle.dumps(sent))
    assert (got.run_id, got.version, got.at_s, got.forecast.agents) == ("r", 3, 1.0, ("a",))
    assert (got.forecast.step.tolist(), got.forecast.wait_s.tolist()) == ([[0.25, 0.75]], [2.0])
    assert pickle.loads(pickle.dumps(Forecast((), np.ones((2, 1))))).wait_s is None


def test_no_field_is_lost_to_a_class_that_cannot_be_made_from_its_values_in_order():
    """A field that only a keyword can set would be missing on the other side."""
    for kind in (*map(type, EVENTS), Batch, PublishForecast, RetireRun, Place, Held, ReplicaNews, Changes, Forecast):
        assert kind.__match_args__ == tuple(kind.__dataclass_fields__), kind

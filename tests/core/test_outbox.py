import numpy as np

from pbkv_ray.core.actions import PublishForecast, RetireRun
from pbkv_ray.core.forecast import Forecast
from pbkv_ray.core.outbox import Outbox

FORECAST = Forecast(("a",), np.array([[0.5, 0.5]]))


def publish(run_id: str, version: int) -> PublishForecast:
    return PublishForecast(run_id, version, FORECAST, 0.0)


def test_only_the_newest_forecast_of_a_run_waits_and_an_ending_is_final():
    outbox = Outbox()
    for action in (publish("a", 1), publish("b", 1), publish("a", 2), RetireRun("b", 1.0), publish("b", 2)):
        outbox.put(action)
    assert outbox.take(0) == (4, [publish("a", 2), RetireRun("b", 1.0)])


def test_what_was_not_acknowledged_is_given_again():
    outbox = Outbox()
    outbox.put(RetireRun("a", 1.0))
    outbox.put(RetireRun("b", 1.0))
    assert outbox.take(0, limit=1) == (1, [RetireRun("a", 1.0)])
    assert outbox.take(0) == (2, [RetireRun("a", 1.0), RetireRun("b", 1.0)])
    assert outbox.take(1) == (2, [RetireRun("b", 1.0)])
    assert outbox.take(2) == (2, [])
    assert len(outbox) == 0


def test_beyond_its_capacity_forecasts_go_before_endings():
    outbox = Outbox(capacity=2)
    for action in (RetireRun("a", 1.0), publish("b", 1), RetireRun("c", 1.0), RetireRun("d", 1.0)):
        outbox.put(action)
    assert outbox.take(0)[1] == [RetireRun("c", 1.0), RetireRun("d", 1.0)]
    assert outbox.dropped == 2

"""How many replicas: what waits to be computed decides, not how many ask."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pbkv_ray.core.scaling import Load, ScalingOptions, wanted_replicas
from pbkv_ray.errors import ConfigError

OPTIONS = ScalingOptions(queued_tokens=1_000, max_running=10)
LOADS = st.lists(st.builds(Load, st.floats(0, 1e7), st.floats(0, 64)), min_size=1, max_size=8)


@pytest.mark.parametrize(
    ("loads", "now", "wanted", "because"),
    [
        ([Load(0, 0)] * 2, 2, 1, "nothing waits and nothing runs"),
        ([Load(0, 9)] * 2, 2, 2, "18 calls fill more than two thirds of one"),
        ([Load(0, 3)] * 4, 4, 2, "12 calls fit into two"),
        ([Load(300, 0)] * 2, 2, 2, "some wait: nobody goes"),
        ([Load(1_500, 10)] * 2, 2, 3, "half as much again as there should be"),
        ([Load(1_001, 10)] * 2, 2, 3, "a little behind is one more"),
        ([Load(90_000, 10)] * 2, 2, 4, "far behind, and no more than twice at once"),
        ([Load(3_000, 10), Load(0, 0)], 2, 3, "one is behind for both: routing evens it out"),
        ([], 3, 3, "nobody has said anything"),
        ([], 0, 1, "there is always one"),
    ],
)
def test_what_waits_decides(loads: list[Load], now: int, wanted: int, because: str):
    assert wanted_replicas(loads, now, OPTIONS) == wanted, because


@settings(deadline=None)
@given(LOADS, st.integers(1, 32))
def test_more_work_never_wants_fewer(loads: list[Load], now: int):
    more = [Load(load.queued_prefill_tokens * 2, load.running_calls + 1) for load in loads]
    assert 1 <= wanted_replicas(loads, now, OPTIONS) <= wanted_replicas(more, now, OPTIONS) <= 2 * now


def test_a_rule_that_cannot_be_is_refused():
    with pytest.raises(ConfigError, match="is no scaling rule"):
        ScalingOptions(queued_tokens=0)

"""Outputs never change: cold, from the device tier and from the host tier, under every policy of ours. Two engines."""

import pytest

from pbkv_ray.replay.same_answers import OURS, examine, small_engine

pytestmark = [pytest.mark.engine, pytest.mark.soak]


async def test_greedy_answers_are_the_same_wherever_the_prompt_comes_from(tiny_model) -> None:  # type: ignore[no-untyped-def]
    result = await examine(small_engine(tiny_model), ("lru", *OURS), count=40, tokens=4)
    same = {"cold": 0, "device": 0, "host": 0}
    assert {policy: row["different"] for policy, row in result["policies"].items()} == dict.fromkeys(
        ("lru", *OURS), same
    )
    for policy, row in result["policies"].items():
        assert row["from"]["device"] == {"none": 0, "device": 40, "host": 0}, policy
        # What one prompt brought back from the host, the next of its family finds on the device.
        assert row["from"]["host"]["none"] == 0, policy
        assert row["from"]["host"]["host"] > 20, policy

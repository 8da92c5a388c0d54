"""What engines say of themselves becomes plain numbers; SGLang's real pools tell how full they are."""

import pytest

from deployments.vitals import Vitals
from pbkv_ray.core.events import Residency
from pbkv_ray.engine.facts import Evicted, Overseen, Pools, Prefetched


def test_the_newest_of_each_fact_is_kept_and_others_are_left_alone() -> None:
    vitals = Vitals()
    vitals.heard(Residency("a", "e", 1.0))
    assert vitals.numbers() == {}
    vitals.heard(Pools({"device_pool": 64, "device_free": 8}))
    vitals.heard(Prefetched({"planned": 9, "useful": 3, "late": 2, "wasted": 1}))
    vitals.heard(Evicted({"device": {"retired": 3, "scored": 4}, "host": {}}, 0, 0, 0))
    vitals.heard(Overseen("pbkv", "ordered", False, 900, 400, 0, 0, 0, 0, 0, 0.0, 0))  # its shadow is off
    vitals.heard(Pools({"device_pool": 64, "device_free": 0}))
    assert vitals.numbers() == {
        "device_pool": 64,
        "device_free": 0,
        "prefetch_useful": 3,
        "prefetch_late": 2,
        "prefetch_wasted": 1,
        "evicted_device_tokens": 7,
        "evicted_host_tokens": 0,
    }
    assert vitals.lru_in_charge
    vitals.heard(Overseen("pbkv", "policy", True, 900, 400, 300, 0, 0, 0, 0, 0.0, 0))
    assert not vitals.lru_in_charge
    assert (vitals.numbers()["shadow_prompt_tokens"], vitals.numbers()["shadow_cached_tokens"]) == (900, 300)


def test_pools_are_those_of_the_real_allocators() -> None:
    pytest.importorskip("sglang")
    from pbkv_ray.core.calls import Caller
    from pbkv_ray.engine.pools import pools
    from pbkv_ray.replay.bare_cache import BareCache

    bare = BareCache("pbkv", 64, host_ratio=2.0)
    found = pools(bare.cache)
    host = found["host_pool"]
    assert host >= 128  # SGLang rounds up
    assert found == {
        "device_pool": 64,
        "device_free": 64,
        "device_retired": 0,
        "host_pool": host,
        "host_free": host,
        "host_retired": 0,
    }
    bare.call(Caller("r1", "w", "a", 0), list(range(1, 21)), [99])
    bare.end("r1")
    found = pools(bare.cache)
    assert (found["device_free"], found["device_retired"]) == (64 - 21, 21)  # the prompt and its answer

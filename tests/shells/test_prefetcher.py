"""Prefetch on SGLang's real cache object: what comes from the host while a batch only decodes, and what is counted."""

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sglang")
from pbkv_ray.replay.bare_cache import BareCache
from tests.shells.test_radix import always, caller, held

CODER, TESTER, OTHER = list(range(100, 200)), list(range(300, 400)), list(range(500, 900))
WRITE_POLICIES = ("write_through", "write_back")


def batch(kind: str) -> Any:
    """As much of a ScheduleBatch as the prefetcher looks at."""
    mode = SimpleNamespace(is_decode=lambda: kind == "decode", is_extend=lambda: kind == "prefill")
    return SimpleNamespace(forward_mode=mode, reqs=[])


def step(bare: BareCache, kind: str = "decode") -> None:
    """One round of the scheduler's loop."""
    bare.cache.check_hicache_events()
    bare.cache.prefetcher.before(batch(kind), None)


def counts(bare: BareCache) -> dict[str, int]:
    count = bare.cache.prefetcher.count
    bare.cache.prefetcher._plan.check_invariants()
    return {name: getattr(count, name) for name in ("planned", "useful", "late", "wasted", "failed")}


def on_the_host(write_policy: str, tokens: int = 600) -> BareCache:
    """Two agents' contexts were pushed to the host by a run that has the device now."""
    bare = BareCache("pbkv", tokens, host_ratio=2.0, write_policy=write_policy)
    bare.call(caller("run", "coder"), CODER)
    bare.call(caller("run", "tester"), TESTER)
    bare.evict(200)
    assert (held(bare, CODER), held(bare, TESTER)) == ((0, 100), (0, 100))
    return bare


@pytest.mark.parametrize("write_policy", WRITE_POLICIES)
def test_the_agent_that_calls_next_finds_its_context_on_the_device(write_policy: str) -> None:
    bare = on_the_host(write_policy)
    bare.index.update("run", always("coder"), version=1, at_s=0.0)
    step(bare)
    assert (held(bare, CODER), held(bare, TESTER)) == ((100, 0), (0, 100))
    step(bare)
    hit = bare.call(caller("run", "coder"), [*CODER, 7])
    assert (hit.device, hit.host) == (100, 0)
    assert counts(bare) == {"planned": 100, "useful": 100, "late": 0, "wasted": 0, "failed": 0}
    bare.cache.sanity_check()


def test_nothing_is_loaded_with_a_prefill_or_without_a_forecast() -> None:
    bare = on_the_host("write_through")
    step(bare)
    bare.index.update("run", always("coder"), version=1, at_s=0.0)
    step(bare, "prefill")
    bare.cache.prefetcher.before(None, None)
    assert held(bare, CODER) == (0, 100)
    assert counts(bare)["planned"] == 0


@pytest.mark.parametrize("write_policy", WRITE_POLICIES)
def test_no_active_node_makes_room_for_a_prefetch_but_a_retired_one_does(write_policy: str) -> None:
    bare = on_the_host(write_policy, tokens=450)
    bare.call(caller("other", "coder"), OTHER)  # 50 tokens stay free
    bare.index.update("run", always("coder"), version=1, at_s=0.0)
    step(bare)
    assert held(bare, OTHER) == (400, 0)
    assert held(bare, CODER) == (0, 100)
    bare.end("other")
    step(bare)
    assert held(bare, CODER) == (100, 0)
    assert sum(held(bare, OTHER)[:1]) < 400
    bare.cache.sanity_check()
    bare.index.check_invariants()


def test_the_aggressive_variant_may_take_its_share_from_active_nodes() -> None:
    bare = BareCache("pbkv", 450, host_ratio=2.0, aggressive_share=0.3)
    bare.call(caller("run", "coder"), CODER)
    bare.evict(100)
    bare.call(caller("other", "tester"), OTHER)
    bare.index.update("run", always("coder"), version=1, at_s=0.0)
    step(bare)
    assert held(bare, CODER) == (100, 0)
    assert bare.cache.tree_core.count.evicted_tokens[0]["retired"] == 0


def test_what_leaves_the_device_unused_was_wasted() -> None:
    bare = on_the_host("write_through")
    bare.index.update("run", always("coder"), version=1, at_s=0.0)
    step(bare)
    step(bare)
    bare.end("run")
    bare.evict(600)
    assert counts(bare) == {"planned": 100, "useful": 0, "late": 0, "wasted": 100, "failed": 0}


def test_a_request_that_needs_what_is_on_its_way_counts_it_as_late_and_the_forward_waits_for_it() -> None:
    bare = on_the_host("write_through")
    bare.index.update("run", always("coder"), version=1, at_s=0.0)
    step(bare)
    waited = list[Any]()
    prefetcher = bare.cache.prefetcher
    unfinished = SimpleNamespace(query=lambda: False)
    prefetcher._unfenced = [unfinished]
    bare.call(caller("run", "coder"), [*CODER, 7])
    prefetcher.before(batch("prefill"), SimpleNamespace(wait_event=waited.append))
    assert counts(bare) == {"planned": 100, "useful": 0, "late": 100, "wasted": 0, "failed": 0}
    assert waited == [unfinished]


def test_without_a_host_tier_there_is_nothing_to_prefetch() -> None:
    assert BareCache("pbkv", 600).cache.prefetcher is None

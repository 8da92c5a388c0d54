"""Why a call missed: told span by span."""

from hypothesis import given, settings
from hypothesis import strategies as st

from pbkv_ray.core.misses import Missed, MissLedger
from pbkv_ray.core.nodes import Tier

BLOCKS = [11, 12, 13, 14]  # of a prompt of 400 tokens


def ledger() -> MissLedger:
    return MissLedger(100)


def test_what_was_never_computed_here_says_so_and_only_once():
    misses = ledger()
    assert misses.call("r1", 450, 0, 0, BLOCKS, None) == [Missed(0, 450, "never_cached")]
    assert misses.call("r1", 450, 449, 0, BLOCKS, None) == [Missed(449, 450, "never_cached")]


def test_an_eviction_tells_when_and_with_which_score():
    misses = ledger()
    misses.call("r1", 400, 0, 0, BLOCKS, None)
    misses.left(["r1", "r2"], 200, 100, Tier.DEVICE, "scored", 0.25, 7.0)
    misses.left(["r1"], 300, 100, Tier.DEVICE, "recency", 0.0, 8.0)
    gone = [Missed(200, 300, "evicted", 7.0, 0.25, "scored"), Missed(300, 400, "evicted", 8.0, 0.0, "recency")]
    assert misses.call("r1", 420, 200, 0, BLOCKS, None) == [*gone, Missed(400, 420, "never_cached")]
    # It was computed again: the next call that misses it does so for another reason.
    assert misses.call("r1", 420, 200, 0, BLOCKS, None)[0] == Missed(200, 400, "evicted")
    assert misses.call("r2", 300, 200, 0, BLOCKS[:3], None) == [gone[0]]


def test_what_the_host_tier_had_was_demoted():
    misses = ledger()
    misses.left(["r1"], 100, 200, Tier.DEVICE, "scored", 0.5, 3.0)
    found = misses.call("r1", 310, 100, 200, [], None)
    assert found == [Missed(100, 300, "demoted", 3.0, 0.5, "scored"), Missed(300, 310, "never_cached")]


def test_a_prefix_of_an_ended_run_was_retired_and_that_of_another_tenant_is_kept_apart():
    misses = ledger()
    misses.call("old", 400, 0, 0, BLOCKS, None)
    misses.end("old")
    assert misses.call("new", 400, 0, 0, BLOCKS, None) == [Missed(0, 400, "retired")]
    assert misses.call("theirs", 400, 0, 0, BLOCKS, "salt") == [Missed(0, 400, "salt")]
    assert misses.call("other", 300, 0, 0, [11, 99, 98], "salt") == [
        Missed(0, 100, "retired"),
        Missed(100, 300, "never_cached"),
    ]


def test_the_tables_are_bounded():
    misses = MissLedger(100, max_runs=10, max_spans=3, max_blocks=20)
    for n in range(1_000):
        misses.left([f"r{n}", "one"], n, 1, Tier.DEVICE, "scored", 0.0, 0.0)
        misses.call(f"r{n}", 100, 0, 0, [n], None)
    assert (len(misses._left), len(misses._left["one"]), len(misses._blocks)) == (10, 3, 20)


SPANS = st.tuples(st.integers(0, 500), st.integers(1, 200), st.sampled_from(list(Tier)))


@settings(deadline=None)
@given(st.lists(SPANS, max_size=12), st.integers(1, 600), st.integers(0, 300), st.integers(0, 300))
def test_every_token_that_was_not_on_the_device_has_one_cause(spans, prompt: int, device: int, host: int):
    device = min(device, prompt - 1)
    host = min(host, prompt - 1 - device)
    misses = ledger()
    for start, tokens, tier in spans:
        misses.left(["r"], start, tokens, tier, "scored", 0.1, 1.0)
    told = misses.call("r", prompt, device, host, BLOCKS[: prompt // 100], None)
    at = device
    for one in told:
        assert (one.start, one.end > one.start) == (at, True)
        at = one.end
    assert at == prompt

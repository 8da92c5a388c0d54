"""From what leaves the tree to what the server hears of a call: over the real socket, without an engine."""

from collections.abc import Iterator
from queue import Queue
from types import SimpleNamespace
from typing import Any

import pytest

from pbkv_ray.core.misses import Missed
from pbkv_ray.core.nodes import Explanation, Tier
from pbkv_ray.engine.facts import CallMissed, Fact, FactsReceiver, FactsSender
from pbkv_ray.engine.hints import Owner
from pbkv_ray.engine.misses import MAX_SPANS, EngineMisses

OWNER = Owner("run", "judge", "hover")


def request(prompt: int, device: int = 0, host: int = 0, rid: str = "c1", **fields: Any) -> SimpleNamespace:
    """The part of SGLang's request that is read."""
    known = {"rid": rid, "origin_input_ids": list(range(prompt)), "extra_key": None}
    return SimpleNamespace(**(known | {"cached_tokens_device": device, "cached_tokens_host": host} | fields))


def gone(run: str, depth: int, score: float = 0.25) -> Explanation:
    return Explanation((1, score, 7.0), "scored", ((run, ("judge",)),), 0, False, depth)


@pytest.fixture
def heard() -> Iterator[tuple[Queue[Fact], FactsSender]]:
    facts: Queue[Fact] = Queue()
    receiver = FactsReceiver(facts.put)
    yield facts, FactsSender(receiver.endpoint)
    receiver.close()


def test_a_call_hears_why_it_missed(heard: tuple[Queue[Fact], FactsSender]) -> None:
    facts, sender = heard
    misses = EngineMisses(sender, lambda: 42.0)
    misses.admitted(request(200), OWNER)
    misses.evicted(Tier.DEVICE, 136, gone("run", 64))
    misses.admitted(request(200, device=64, rid="c2"), OWNER)
    misses.admitted(request(200, device=64), None)  # foreign traffic that names no run
    misses.admitted(request(200, rid="c3", extra_key="tenant"), Owner("other", "judge"))
    assert [facts.get(timeout=30) for _ in range(3)] == [
        CallMissed("c1", (Missed(0, 200, "never_cached"),)),
        CallMissed("c2", (Missed(64, 200, "evicted", 42.0, 0.25, "scored"),)),
        CallMissed("c3", (Missed(0, 192, "salt"), Missed(192, 200, "never_cached"))),
    ]
    assert facts.empty()


def test_a_shredded_prompt_is_told_in_so_many_spans(heard: tuple[Queue[Fact], FactsSender]) -> None:
    facts, sender = heard
    misses = EngineMisses(sender, lambda: 0.0)
    for depth in range(0, 1_000, 20):
        misses.evicted(Tier.DEVICE, 10, gone("run", depth))
    misses.admitted(request(1_000), OWNER)
    told = facts.get(timeout=30)
    assert isinstance(told, CallMissed)
    assert (len(told.spans), told.spans[0].start, told.spans[-1].end) == (MAX_SPANS, 0, 1_000)


def test_what_fails_ends_the_reports_and_nothing_else(
    heard: tuple[Queue[Fact], FactsSender], caplog: pytest.LogCaptureFixture
) -> None:
    facts, sender = heard
    misses = EngineMisses(sender, lambda: 0.0)
    misses.admitted(request(10, origin_input_ids=None), OWNER)
    misses.admitted(request(10), OWNER)
    assert facts.empty()
    assert [record.message for record in caplog.records] == ["misses are not explained any more"]

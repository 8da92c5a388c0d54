"""`GET /v1/runs/{run_id}/kv`: from the reply of a call to the JSON that explains it."""

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from deployments.gateway import create_app
from deployments.kv import kv_json, report_text
from pbkv_ray.core.calls import CacheReport, Call, Chunk
from pbkv_ray.core.events import CallFinished
from pbkv_ray.core.misses import Missed
from pbkv_ray.core.routing import Cost, Decision
from pbkv_ray.store import CallRow
from tests.shells.fake_runs import FakeChat
from tests.shells.gateway_kit import served
from tests.shells.runner_kit import FakeTransport, Kit, request, specs

COSTS = Cost("a", 0.1, 0.0, 0.25, 0.0), Cost("b", 0.9, 0.0, 0.0, 0.0)
REPORT = CacheReport(
    (Missed(0, 100, "evicted", 12.34567891, 0.5, "scored"), Missed(100, 130, "never_cached")),
    Decision("a", "home", 30, COSTS),
)
EVICTED = {"start": 0, "end": 100, "cause": "evicted", "at_s": 12.345679, "score": 0.5, "reason": "scored"}


class ReportingTransport(FakeTransport):
    """Answers that explain themselves."""

    async def stream(self, call: Call) -> AsyncIterator[Chunk]:
        async for chunk in super().stream(call):
            assert chunk.reply is not None
            yield replace(chunk, reply=replace(chunk.reply, report=REPORT))


async def test_a_run_explains_what_the_cache_did_for_it(tmp_path: Path):
    async with Kit(f"sqlite+aiosqlite:///{tmp_path / 'runs.sqlite'}") as kit:
        runner = await kit.runner(transport=ReportingTransport())
        run = (await runner.create_run(request("hello")))["run_id"]
        await runner.wait_run(None, run)
        workflows = {name: name for name in specs()}
        async with (
            served(create_app(runner, FakeChat(), workflows=workflows)) as url,
            httpx.AsyncClient(base_url=url) as client,
        ):
            told = (await client.get(f"/v1/runs/{run}/kv")).json()
            assert (await client.get("/v1/runs/00000000-0000-0000-0000-000000000000/kv")).status_code == 404
        assert told["run_id"] == run
        first, second = told["calls"]
        assert [(call["order"], call["agent"], call["replica"]) for call in (first, second)] == [
            (1, "plan", "replica-1"),
            (2, "write", "replica-1"),
        ]
        assert first["cached_tokens"] == {"device": 4, "host": 1}
        assert first["missed"] == [EVICTED, {"start": 100, "end": 130, "cause": "never_cached"}]
        assert first["routed"] == {
            "reason": "home",
            "tokens": 30,
            "costs": [
                {"replica": "a", "compute_s": 0.1, "load_s": 0.0, "queue_s": 0.25, "crowd_s": 0.0, "total_s": 0.35},
                {"replica": "b", "compute_s": 0.9, "load_s": 0.0, "queue_s": 0.0, "crowd_s": 0.0, "total_s": 0.9},
            ],
        }
        # The record of calls stays what it was, and the controller is spared the report.
        assert "report" not in (await runner.run_calls(run))[0]
        finished = [event for event in kit.emitted if isinstance(event, CallFinished)]
        assert [event.report for event in finished] == [None, None]
        # It goes with the run.
        kit.clock.now += 100
        await runner.prune(0.0)
        assert await kit.store.events.calls_of(run, 10, reports=True) == []


def row(replica: str, prompt: int, spans: list[Missed] | None, **changes: Any) -> CallRow:
    report = None if spans is None else report_text(CacheReport(tuple(spans)))
    made = CallRow("r", 1, "c", "judge", 1, "stop", prompt, 0, 0, 5, 1.0, replica, 0.0, report)
    return replace(made, **changes)


@pytest.mark.parametrize(
    ("earlier", "missed", "shown"),
    [
        ([("b", 80)], Missed(0, 100, "never_cached"), [(0, 80, "other_replica", "b"), (80, 100, "never_cached", None)]),
        ([("b", 200)], Missed(0, 100, "never_cached"), [(0, 100, "other_replica", "b")]),
        ([("a", 90), ("b", 200)], Missed(50, 100, "never_cached"), [(50, 100, "never_cached", None)]),
        ([("b", 200)], Missed(0, 100, "evicted"), [(0, 100, "evicted", None)]),
        ([], Missed(0, 100, "never_cached"), [(0, 100, "never_cached", None)]),
    ],
)
def test_a_run_that_moved_left_its_cache_on_the_other_replica(earlier, missed: Missed, shown):
    calls = [*(row(replica, prompt, []) for replica, prompt in earlier), row("a", 100, [missed])]
    spans = kv_json("r", calls)["calls"][-1]["missed"]
    assert [(span["start"], span["end"], span["cause"], span.get("replica")) for span in spans] == shown


def test_a_call_without_a_report_tells_what_it_found_only():
    (call,) = kv_json("r", [row("a", 100, None)])["calls"]
    assert (call["routed"], call["missed"], call["prompt_tokens"]) == (None, None, 100)


def test_of_many_replicas_the_cheapest_and_the_chosen_are_shown():
    costs = tuple(Cost(f"replica {n:02}", float(n), 0.0, 0.0, 0.0) for n in range(100))
    text = report_text(CacheReport((), Decision("replica 90", "home", 1, costs)))
    (call,) = kv_json("r", [row("replica 90", 1, None, report=text)])["calls"]
    shown = [cost["replica"] for cost in call["routed"]["costs"]]
    assert shown == [*(f"replica {n:02}" for n in range(16)), "replica 90"]

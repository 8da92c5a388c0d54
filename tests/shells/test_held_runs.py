"""A gate in the runner: new runs wait while what the running ones hold does not fit, and say so."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest_asyncio

from pbkv_ray.core.admission import AdmissionOptions
from pbkv_ray.core.gate import Gate
from tests.shells.runner_kit import Kit, request


@pytest_asyncio.fixture
async def kit(tmp_path: Path) -> AsyncIterator[Kit]:
    async with Kit(f"sqlite+aiosqlite:///{tmp_path / 'runs.sqlite'}") as made:
        yield made


async def status_of(runner: Any, run_id: str, held: bool) -> dict[str, Any]:
    """The waiting run, once the runner has looked at it."""
    while (run := await runner.get_run(None, run_id))["queue"]["reason"].startswith("a place") == held:
        await asyncio.sleep(0.01)
    found: dict[str, Any] = run
    return found


async def test_a_new_run_is_held_while_the_running_one_fills_the_cache_and_knows_its_place(kit: Kit) -> None:
    runner = await kit.runner(gate=Gate(10, options=AdmissionOptions(cold_runs=1)))
    first = await runner.create_run(request("wait"))
    await kit.transport.waiting.wait()  # in its second call: the first one left 12 tokens
    second, third = [await runner.create_run(request(task)) for task in ("two", "three")]
    held = await status_of(runner, second["run_id"], held=True)
    assert held["queue"]["position"] == 1
    assert held["queue"]["reason"].startswith("1 runs are in flight, and with one more they would hold about 12 tokens")
    listed = {run["run_id"]: run.get("queue", {}).get("position") for run in await runner.list_runs(None, None, 10, 0)}
    assert listed == {first["run_id"]: None, second["run_id"]: 1, third["run_id"]: 2}
    assert "pbkv_runs_held 1.0" in runner.metrics_text()
    kit.transport.let_go.set()
    for run in (first, second, third):
        await runner.wait_run(None, run["run_id"])
    assert kit.transport.agents == ["plan", "write"] * 3  # one after the other, first come first
    assert "queue" not in await runner.get_run(None, third["run_id"])


async def test_what_fits_begins_at_once(kit: Kit) -> None:
    runner = await kit.runner(gate=Gate(1_000, options=AdmissionOptions(cold_runs=1)))
    runs = [await runner.create_run(request("wait")) for _ in range(3)]
    while kit.transport.agents.count("write") < 3:
        await asyncio.sleep(0.01)
    kit.transport.let_go.set()
    for run in runs:
        await runner.wait_run(None, run["run_id"])

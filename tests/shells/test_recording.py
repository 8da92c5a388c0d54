"""From the controller's events to the store and back."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from pathlib import Path

import numpy as np
import pytest

from deployments.recording import record_runs
from pbkv_ray.config import ControllerOptions, EngineOptions
from pbkv_ray.control import recording
from pbkv_ray.control.actor import ControllerHost
from pbkv_ray.core.calls import Call, Chunk, Reply
from pbkv_ray.core.events import Batch, CallFinished, CallStarted, CallState, RunEnded, RunStarted
from pbkv_ray.core.journal import RecordedCall, RecordedRun
from pbkv_ray.engine.facts import Fact, HiddenState
from pbkv_ray.errors import EngineError
from pbkv_ray.predict import dataset
from pbkv_ray.replay.recorded import export
from pbkv_ray.store import Recording, Store
from tests.e2e.echo_workflow import REGISTRY
from tests.shells.store_urls import BACKENDS, fresh_database


@pytest.fixture(params=BACKENDS)
async def url(request: pytest.FixtureRequest, tmp_path: Path):
    async for url in fresh_database(request.param, tmp_path):
        yield url


def run(number: int, workflow: str = "swe") -> RecordedRun:
    calls = [RecordedCall(f"c{number}-{n}", "coder", n, 1.0 + n, 0.5, "stop", 10, 2) for n in range(2)]
    calls[0].prefill = b"\x00\x3c"
    return RecordedRun(f"r{number}", workflow, 1.0, 3.0, "completed", calls)


async def read(store: Store, workflow: str | None = None) -> list[Recording]:
    return [one async for one in store.recordings.read(workflow)]


async def test_what_is_recorded_is_read_back_once_and_the_oldest_go_first(url: str):
    store = await Store.open(url)
    assert await store.recordings.add([run(1), run(2, "hover")], max_kept=200) == 0
    assert await store.recordings.add([run(2, "hover"), run(3)], max_kept=200) == 0, "sent again after an error"
    assert await read(store) == [Recording(run(1), None), Recording(run(2, "hover"), None), Recording(run(3), None)]
    assert await read(store, "hover") == [Recording(run(2, "hover"), None)]
    assert await store.recordings.add([run(n) for n in range(4, 204)], max_kept=150) == 53
    assert (await store.recordings.count(), (await read(store))[0].run.run_id) == (150, "r54")
    await store.close()


async def test_the_controller_records_runs_with_their_hidden_states(url: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(recording, "EVERY_S", 0.01)
    monkeypatch.setattr("pbkv_ray.control.actor.TICK_S", 0.01)
    monkeypatch.setattr(recording, "SETTLE_S", 0.0)
    host = ControllerHost(ControllerOptions(record_to=url))
    events = RunStarted("r1", "swe", 1.0), CallStarted("r1", "coder", 1, "c1", 1.5)
    await host.events(Batch("runner", 0, events))
    await host.states([CallState("c1", "prefill", np.array([1.0], np.float16), np.array([5], np.int64))], 2)
    ending = CallFinished("r1", "coder", 1, "c1", 2.0, "stop", 30, 4, seconds=0.5), RunEnded("r1", "completed", 2.5)
    await host.events(Batch("runner", 2, ending))
    async with asyncio.timeout(30):
        while (await host.counts()).get("recorded_runs", 0) == 0:
            await asyncio.sleep(0.01)
    counts = await host.counts()
    assert (counts["recorded_calls"], counts["states_dropped"], counts["recorded_runs_waiting"]) == (1, 2, 0)
    store = await Store.open(url)
    (kept,) = await read(store)
    call = RecordedCall("c1", "coder", 1, 1.5, 0.5, "stop", 30, 4, prefill=b"\x00\x3c", blocks=b"\5" + bytes(7))
    assert kept == Recording(RecordedRun("r1", "swe", 1.0, 2.5, "completed", [call]), None)
    await store.close()


async def test_a_store_that_is_gone_costs_records_and_nothing_else(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(recording, "EVERY_S", 0.01)
    monkeypatch.setattr("pbkv_ray.control.actor.TICK_S", 0.01)
    monkeypatch.setattr(recording, "SETTLE_S", 0.0)
    host = ControllerHost(ControllerOptions(record_to="mysql://nowhere"))
    await host.events(Batch("runner", 0, (RunStarted("r1", "swe", 1.0), CallStarted("r1", "coder", 1, "c1", 1.5))))
    await host.events(Batch("runner", 2, (RunEnded("r1", "completed", 2.5),)))
    async with asyncio.timeout(30):
        while (await host.counts()).get("recorded_errors", 0) == 0:
            await asyncio.sleep(0.01)
    counts = await host.counts()
    assert (counts["runs_completed"], counts["recorded_runs_waiting"]) == (1, 1)


class FakeEngine:
    """Answers every call at once, and reports the two hidden states of a call on another thread, as engines do."""

    def __init__(self, options: EngineOptions, *, replica: str, on_fact: Callable[[Fact], None], hidden_states: bool):
        assert hidden_states
        self._on_fact = on_fact

    async def stream(self, call: Call) -> AsyncGenerator[Chunk, None]:
        if "fail" in call.messages[-1].content:
            raise EngineError("the engine failed")
        blocks = np.arange(3, dtype=np.int64)
        for token, value in (("prefill", 1.0), ("decoded", 2.0)):
            fact = HiddenState(call.call_id, token, np.array([value], np.float16), blocks)  # type: ignore[arg-type]
            await asyncio.to_thread(self._on_fact, fact)
        yield Chunk("hello", Reply("hello", "stop", 48, 5, 0, 0, 0.1, 0.05, "record"))

    def shutdown(self) -> None: ...


async def test_a_workflow_is_recorded_in_one_process_and_a_run_that_fails_stops_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(recording, "EVERY_S", 0.01)
    monkeypatch.setattr("pbkv_ray.control.actor.TICK_S", 0.01)
    monkeypatch.setattr(recording, "SETTLE_S", 1.0)  # the engine's thread may be late
    monkeypatch.setattr("deployments.recording.EngineServer", FakeEngine)
    url, ended = f"sqlite:///{tmp_path / 'runs.sqlite'}", list[str]()
    inputs = [{"task": f"task {number}", "rounds": 2} for number in range(5)] + [{"task": "fail", "rounds": 1}]
    inputs += inputs[:1]
    lost = await record_runs(
        REGISTRY["echo"], inputs, EngineOptions("fake", policy="lae"), url, concurrency=3, done=ended.append
    )
    assert lost == {}
    again = "left out: the same input ran before, and says nothing new at temperature 0"
    assert sorted(ended) == ["completed"] * 5 + ["failed: the engine failed", again]
    out = tmp_path / "echo.wf.jsonl.gz"
    assert await asyncio.to_thread(export, url, out) == (5, 10)
    trace = dataset.load(out)
    assert {run.agents for run in trace.runs} == {("speaker", "speaker")}
    assert len({run.instance for run in trace.runs}) == 5
    assert all(run.hidden["prefill"].tolist() == [[1.0], [1.0]] for run in trace.runs)
    assert all(run.hidden["decode"].tolist() == [[2.0], [2.0]] for run in trace.runs)

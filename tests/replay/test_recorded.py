"""Recorded runs leave the store as a trace that replay, training and evaluation read."""

import asyncio
from pathlib import Path

import numpy as np
import pytest

from pbkv_ray.core.ghost import block_hashes
from pbkv_ray.core.journal import RecordedCall, RecordedRun
from pbkv_ray.errors import InputError
from pbkv_ray.predict import dataset
from pbkv_ray.replay.recorded import export, state_arrays
from pbkv_ray.replay.traces import read_trace
from pbkv_ray.store import NewRun, Recording, Store


def call(call_id: str, agent: str, started_s: float, prompt: list[int], state: float | None) -> RecordedCall:
    made = RecordedCall(call_id, agent, 1, started_s, 0.5, "stop", len(prompt), 4)
    made.blocks = np.array(block_hashes(prompt, 16), "<i8").tobytes()
    if state is not None:
        made.prefill, made.decode = (np.array([state, k], "<f2").tobytes() for k in (1.0, 2.0))
    return made


def recorded() -> list[RecordedRun]:
    system, task = list(range(32)), list(range(100, 140))
    first = [call("a", "planner", 10.0, system + task, 0.5), call("b", "coder", 12.0, system + [7] * 20, 0.25)]
    again = [call("c", "planner", 11.0, system + task + [9] * 16, 0.125)]
    cut = [call("d", "planner", 11.0, system, 0.0)]
    return [
        RecordedRun("r1", "swe", 9.5, 13.0, "completed", first),
        RecordedRun("r2", "swe", 10.5, 12.0, "completed", again),
        RecordedRun("r3", "swe", 10.5, 12.0, "cancelled", cut),
    ]


@pytest.fixture
def url(tmp_path: Path) -> str:
    url = f"sqlite:///{tmp_path / 'runs.sqlite'}"

    async def fill() -> None:
        store = await Store.open(url)
        await store.recordings.add(recorded(), 100)
        asked = NewRun("r1", "t", "swe", "enqueue", '{"input": {"b": 1, "a": 2}, "other": 1}')
        await store.runs.admit(asked, max_pending=9, now=1.0, make_thread=True)
        await store.close()

    asyncio.run(fill())
    return url


def test_a_trace_has_the_calls_their_times_and_the_shared_prefixes(url: str, tmp_path: Path):
    out = tmp_path / "own.wf.jsonl.gz"
    assert export(url, out) == (2, 3)
    workload = read_trace(out, standard=False)
    one, two = workload.runs
    assert [(c.agent, c.session, c.prompt_tokens, c.output_tokens, c.at_s, c.wait_s) for c in one.calls] == [
        ("planner", 0, 72, 4, 0.5, None),
        ("coder", 1, 52, 4, 2.5, 1.5),
    ]
    # 32 common tokens are two blocks; r2 goes on where r1's planner ended, with the block that r1 had not filled.
    assert [c.spans for c in one.calls] == [((0, 4),), ((0, 2), (4, 1))]
    assert [c.spans for c in two.calls] == [((0, 4), (5, 1))]
    assert (workload.in_flight, two.instance) == (2, "r2")
    assert one.instance != "r1", "the same input is the same instance"


def test_it_loads_back_as_a_training_set_with_hidden_states(url: str, tmp_path: Path):
    out = tmp_path / "own.wf.jsonl.gz"
    export(url, out)
    trace = dataset.load(out)
    assert [(run.workflow, run.agents) for run in trace.runs] == [("swe", ("planner", "coder")), ("swe", ("planner",))]
    assert trace.runs[0].hidden["prefill"].tolist() == [[0.5, 1.0], [0.25, 1.0]]
    assert trace.runs[1].hidden["decode"].tolist() == [[0.125, 2.0]]
    bare = tmp_path / "bare.wf.jsonl.gz"
    assert export(url, bare, states=False) == (2, 0)
    assert dataset.load(bare).runs[0].hidden == {}
    assert dataset.load(bare).sha256 != trace.sha256


def test_what_cannot_be_exported_is_said_in_a_sentence(url: str, tmp_path: Path):
    with pytest.raises(InputError, match="no completed recorded run of hover; serve with record on"):
        export(url, tmp_path / "x.wf.jsonl", workflow="hover")
    calls = [call("a", "planner", 1.0, [1], 0.5), RecordedCall("b", "coder", 1, 2.0, prefill=bytes(8))]
    with pytest.raises(InputError, match="have 2 and 4 numbers"):
        state_arrays([Recording(RecordedRun("r", "swe", 0.0, 3.0, "completed", calls), None)])

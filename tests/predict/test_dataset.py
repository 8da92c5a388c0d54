"""Traces: what is read, and how runs are parted."""

import base64
import gzip
import json
import os
from pathlib import Path

import numpy as np
import pytest

from pbkv_ray.errors import InputError
from pbkv_ray.predict.dataset import MASKED, folds, labels, load, sample, vocabulary
from tests.predict.traces import runs, write


def test_a_trace_gives_its_runs(tmp_path: Path) -> None:
    trace = load(write(tmp_path / "swe.wf.jsonl.gz", runs("pct", "pc")))
    assert trace.name == "swe"
    assert [run.agents for run in trace.runs] == [("p", "c", "t"), ("p", "c")]
    assert trace.runs[0].instance == "task-0"
    assert trace.runs[0].prompt_tokens.tolist() == [100, 200, 300]
    assert len(trace.sha256) == 64


def test_hidden_states_are_read_when_every_call_has_one(tmp_path: Path) -> None:
    state = base64.b64encode(np.array([1.0, -2.5], "<f2").tobytes()).decode()
    path = tmp_path / "t.jsonl"
    call = {"a": "p", "in": 1, "out": 2, "hp": state}
    rows = [
        {"id": "1", "calls": [call, call]},
        {"id": "2", "calls": [call, {**call, "hp": state}, {"a": "p", "in": 1, "out": 1}]},
    ]
    path.write_text("\n".join(json.dumps(row) for row in rows))
    first, second = load(path).runs
    assert first.hidden["prefill"].tolist() == [[1.0, -2.5], [1.0, -2.5]]
    assert second.hidden == {}


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"not json", "must be JSON lines"), (b'{"id": 1, "calls": [{"a": "p"}]}', "without `id`"), (b"", "holds no run")],
)
def test_what_is_no_trace_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(content)
    with pytest.raises(InputError, match=message):
        load(path)


def test_runs_of_one_instance_share_a_fold_and_folds_are_even() -> None:
    made = runs(*["ab"] * 20)
    twice = made + made
    fold = folds(twice, 5)
    assert fold.tolist() == [*fold[:20], *fold[:20]]
    assert np.bincount(fold).tolist() == [8] * 5
    assert folds(twice, 5).tolist() == fold.tolist()
    assert folds(twice, 5, seed=1).tolist() != fold.tolist()
    with pytest.raises(InputError, match="2 task instances cannot make 3 folds"):
        folds(runs("a", "b"), 3)


def test_a_sample_keeps_whole_instances(tmp_path: Path) -> None:
    trace = load(write(tmp_path / "t.gz", runs("a", "b", "c", "d")))
    few = sample(trace, 2)
    assert len(few.runs) == 2 and set(few.runs) < set(trace.runs)
    assert sample(trace, 9).runs == trace.runs


def test_labels_end_once_and_are_masked_after() -> None:
    (run,) = runs("aba")
    assert labels(run, ("a", "b"), 3).tolist() == [[1, 0, 2], [0, 2, MASKED], [2, MASKED, MASKED]]
    assert labels(run, ("a",), 2).tolist() == [[MASKED, 0], [0, 1], [1, MASKED]]


def test_the_public_traces_load() -> None:
    data = Path(os.environ.get("PBKV_DATA", Path(__file__).parents[2] / "../shared/data"))
    if not data.is_dir():
        pytest.skip(f"{data} is absent; set PBKV_DATA to the folder of the public traces")
    trace = load(data / "chatdev.wf.jsonl.gz")
    assert len(trace.runs) == 57
    assert sum(len(run.agents) for run in trace.runs) == 1375
    assert len(vocabulary(trace.runs)) == 7
    assert len({run.instance for run in trace.runs}) == 56, "one task's log is there twice"
    with gzip.open(data / "acr.wf.jsonl.gz", "rt") as file:
        first = json.loads(file.readlines()[1])
    assert load(data / "acr.wf.jsonl.gz").runs[0].instance == first["inst"]

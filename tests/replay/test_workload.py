"""Traces in, workloads out: formats, tokens, splits, statistics."""

import gzip
import json
import os
from pathlib import Path

import numpy as np
import pytest

from pbkv_ray.errors import InputError
from pbkv_ray.replay.generate import Knobs, generate
from pbkv_ray.replay.keys import Keys
from pbkv_ray.replay.stats import statistics
from pbkv_ray.replay.traces import BlockNames, read_trace, write_trace
from pbkv_ray.replay.workload import TraceCall, TraceRun, Workload, block_tokens, prompt_tokens


def data(name: str) -> Path:
    folder = Path(os.environ.get("PBKV_DATA", Path(__file__).parents[3] / "shared" / "data"))
    path = folder / f"{name}.jsonl.gz"
    if not path.is_file():
        pytest.skip(f"the public traces are not here ({path}); set PBKV_DATA to their folder")
    return path


def workload(*runs: list[tuple[str, list[tuple[int, int]], int]]) -> Workload:
    """Runs of (agent, spans, prompt tokens); outputs of 16 tokens."""
    made = []
    for number, calls in enumerate(runs):
        items = tuple(TraceCall(agent, 0, size, 16, tuple(spans)) for agent, spans, size in calls)
        made.append(TraceRun(f"r{number}", f"i{number}", "w", items))
    return Workload("test", tuple(made), in_flight=2)


def test_prompts_share_exactly_the_prefix_that_their_ids_share() -> None:
    first = TraceCall("a", 0, 40, 8, ((0, 2),))
    second = TraceCall("a", 0, 55, 8, ((0, 1), (9, 2)))
    one, two = prompt_tokens(first, 1000, private=1), prompt_tokens(second, 1000, private=2)
    assert (len(one), len(two)) == (40, 55)
    assert one[:16].tolist() == two[:16].tolist()
    assert one[16] != two[16] or one[17] != two[17]
    assert one[32:].tolist() != prompt_tokens(first, 1000, private=3)[32:].tolist()
    assert one[:32].tolist() == prompt_tokens(first, 1000, private=3)[:32].tolist()
    assert 0 < min(one) <= max(one) < 1000


def test_block_tokens_are_the_same_on_every_machine() -> None:
    assert block_tokens(np.array([0, 7]), 32_000)[[0, 1, 16, 31]].tolist() == [22299, 22517, 11185, 9622]


def test_our_own_format_comes_back_as_it_went(tmp_path: Path) -> None:
    made = generate("swe", 5, seed=3)
    for name in ("runs.jsonl", "runs.jsonl.gz"):
        write_trace(tmp_path / name, made)
        again = read_trace(tmp_path / name, standard=False)
        assert [(r.run_id, r.instance, r.workflow) for r in again.runs] == [
            (r.run_id, r.instance, r.workflow) for r in made.runs
        ]
        for run, copy in zip(made.runs, again.runs, strict=True):
            fields = ("agent", "session", "prompt_tokens", "output_tokens", "spans", "at_s", "wait_s")
            for call, other in zip(run.calls, copy.calls, strict=True):
                assert [getattr(call, f) for f in fields] == [getattr(other, f) for f in fields]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([{"_meta": {}}], "block_tokens"),
        ([{"_meta": {"block_tokens": 16}}, {"id": "x", "calls": [{"a": "b"}]}], "line 2"),
        ([{"_meta": {"block_tokens": 16}}, [1]], "line 2"),
    ],
)
def test_a_broken_trace_says_where(tmp_path: Path, lines: list[object], message: str) -> None:
    path = tmp_path / "broken.jsonl"
    path.write_text("\n".join(json.dumps(line) for line in lines))
    with pytest.raises(InputError, match=message):
        read_trace(path)


def test_requests_with_hash_ids_become_conversations(tmp_path: Path) -> None:
    """Mooncake's format: 512-token blocks, the last one partly filled; a prompt that extends another continues it."""
    rows = [
        {"_meta": {"block_tokens": 512}},
        {"t": 0, "in": 1100, "out": 10, "b": [[0, 3]]},
        {"t": 500, "in": 600, "out": 10, "b": [[7, 2]]},
        {"t": 9000, "in": 2100, "out": 10, "b": [[0, 2], [20, 3]]},
    ]
    path = tmp_path / "mooncake.jsonl.gz"
    with gzip.open(path, "wt") as file:
        file.write("\n".join(map(json.dumps, rows)))
    runs = read_trace(path).runs
    assert [len(run.calls) for run in runs] == [2, 1]
    first, second = runs[0].calls
    assert (first.known_blocks, second.known_blocks, second.at_s) == (64, 128, 9.0)
    assert first.blocks().tolist() == second.blocks()[:64].tolist()


def test_an_instance_is_never_on_both_sides_of_the_split() -> None:
    runs = tuple(TraceRun(f"r{i}", f"i{i % 40}", "w", ()) for i in range(200))
    whole = Workload("test", runs)
    tune, report = (whole.half(half) for half in ("tune", "report"))
    assert len(tune) + len(report) == 200
    assert not {r.instance for r in tune.runs} & {r.instance for r in report.runs}
    assert 50 < len(tune) < 150
    assert [r.run_id for r in whole.cut(20).runs] == [r.run_id for r in whole.cut(50).runs[:20]]


def test_the_footprint_counts_every_block_once() -> None:
    made = workload([("a", [(0, 4)], 70), ("b", [(0, 2), (10, 3)], 90)], [("a", [(0, 4), (20, 4)], 130)])
    assert [run.footprint_tokens for run in made.runs] == [7 * 16, 8 * 16]
    assert made.pool_tokens(0.5, 2) == 120


def test_names_of_blocks_chain() -> None:
    names = BlockNames()
    assert names.spans([1] * 16 + [2] * 16 + [3]) == ((0, 2),)
    assert names.spans([1] * 16 + [4] * 16) == ((0, 1), (2, 1))
    assert names.spans([4] * 16) == ((3, 1),)


def test_outputs_continue_into_the_next_prompt_of_their_session() -> None:
    made = workload([("a", [(0, 4)], 64), ("a", [(0, 4), (50, 3)], 112)])
    assert Keys(made, outputs="continued").output(0, 0).tolist() == [50]
    assert Keys(made, outputs="none").output(0, 0).tolist() == []
    private = Keys(made, outputs="private").output(0, 0)
    assert len(private) == 1 and private[0] > 1 << 40


def test_statistics_of_a_small_trace() -> None:
    made = workload(
        [("a", [(0, 2)], 32), ("b", [(8, 2)], 32), ("a", [(0, 4)], 64)], [("a", [(0, 2)], 32), ("b", [(20, 2)], 32)]
    )
    found = statistics(made)
    assert found["agents"] == {"a": 0.6, "b": 0.4}
    assert found["revisit_gap"] == {"mean": 1.0, "p50": 1.0, "p90": 1.0, "p99": 1.0}
    assert found["runs_that_return"] == 0.5
    assert found["prefix_shared_inside_run"] == round(32 / 192, 4)
    assert found["prefix_shared_at_all"] == round(64 / 192, 4)


def test_shapes_have_their_loops() -> None:
    finance, swe = generate("finance", 20), generate("swe", 200, Knobs.of("swe", loops=0.9))
    assert {run.agents for run in finance.runs} == {("extract", "compute", "check", "report")}
    assert all(run.agents[0] == "planner" and run.agents[-1] == "committer" for run in swe.runs)
    assert max(len(run.calls) for run in swe.runs) == 1 + 3 * 5 - 1 + 1
    again = generate("swe", 200, Knobs.of("swe", loops=0.9))
    assert [r.calls[-1].spans for r in again.runs] == [r.calls[-1].spans for r in swe.runs]


def test_the_standard_part_of_the_public_traces() -> None:
    acr = read_trace(data("acr.wf"))
    assert (len(acr), acr.in_flight, sum(len(r.calls) for r in acr.runs)) == (300, 16, 5062)
    assert all(len(run.calls) >= 5 for run in read_trace(data("hyperagent.wf")).runs)

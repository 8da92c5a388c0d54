"""Recorded runs as a trace in our own format, and their hidden states in a .npz beside it."""

import asyncio
import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from pbkv_ray.core.journal import RecordedCall
from pbkv_ray.errors import InputError
from pbkv_ray.replay.traces import write_trace
from pbkv_ray.replay.workload import TraceCall, TraceRun, Workload
from pbkv_ray.store import Recording, Store

SIGNALS = ("prefill", "decode")


def states_path(trace: Path) -> Path:
    """Where the hidden states of a trace lie: NAME.states.npz beside NAME.wf.jsonl.gz."""
    return trace.parent / f"{trace.name.split('.')[0]}.states.npz"


def export(url: str, out: Path, *, workflow: str | None = None, states: bool = True) -> tuple[int, int]:
    """Write what the store at `url` recorded of completed runs. Returns (runs, calls that have hidden states).

    Raises InputError when nothing was recorded, ConfigError and StoreError as `Store.open` does.
    """
    recordings = [one for one in asyncio.run(_read(url, workflow)) if one.run.outcome == "completed"]
    if not recordings:
        raise InputError(
            f"the store has no completed recorded run{f' of {workflow}' if workflow else ''}; serve with record on"
        )
    write_trace(out, workload(out.name.split(".")[0], recordings))
    if not states:
        return len(recordings), 0
    arrays = state_arrays(recordings)
    np.savez_compressed(states_path(out), **arrays)  # type: ignore[arg-type]
    return len(recordings), int(arrays["known"].all(axis=1).sum())


async def _read(url: str, workflow: str | None) -> list[Recording]:
    store = await Store.open(url)
    try:
        return [one async for one in store.recordings.read(workflow)]
    finally:
        await store.close()


def workload(name: str, recordings: Sequence[Recording]) -> Workload:
    """Runs in the order of their starts. A run's instance is its input, an agent's calls are one session."""
    ids: dict[int, int] = {}  # hash of a block -> its number in this trace
    runs = []
    for one in sorted(recordings, key=lambda one: one.run.started_s):
        run, sessions, ended_s = one.run, dict[str, int](), None
        calls = []
        for call in run.calls:
            calls.append(
                TraceCall(
                    call.agent,
                    sessions.setdefault(call.agent, len(sessions)),
                    call.prompt_tokens,
                    max(1, call.output_tokens),
                    _spans(call, ids),
                    round(call.started_s - run.started_s, 4),
                    None if ended_s is None else round(max(0.0, call.started_s - ended_s), 4),
                )
            )
            ended_s = call.started_s + call.seconds
        runs.append(TraceRun(run.run_id, _instance(one), run.workflow, tuple(calls), run.started_s))
    return Workload(name, tuple(runs), _in_flight(recordings))


def state_arrays(recordings: Sequence[Recording]) -> dict[str, npt.NDArray[np.generic]]:
    """run [calls] ids, call [calls] numbers within the run, prefill and decode [calls, width] float16 with zeros where
    the engine said nothing, known [calls, 2] whether it did. InputError when a signal comes in several widths."""
    calls = [(one.run.run_id, number, call) for one in recordings for number, call in enumerate(one.run.calls)]
    arrays: dict[str, npt.NDArray[np.generic]] = {
        "run": np.array([run_id for run_id, _, _ in calls]),
        "call": np.array([number for _, number, _ in calls], np.int64),
        "known": np.array([[getattr(call, name) is not None for name in SIGNALS] for _, _, call in calls]),
    }
    for name in SIGNALS:
        vectors = [getattr(call, name) for _, _, call in calls]
        widths = {len(vector) for vector in vectors if vector is not None}
        if len(widths) > 1:
            raise InputError(
                f"hidden states {name!r} have {' and '.join(str(width // 2) for width in sorted(widths))} numbers: "
                "they are of several models; export the runs of one"
            )
        nothing = bytes(widths.pop() if widths else 0)
        flat = b"".join(nothing if vector is None else vector for vector in vectors)
        arrays[name] = np.frombuffer(flat, "<f2").reshape(len(calls), -1) if flat else np.zeros((len(calls), 0), "<f2")
    return arrays


def _spans(call: RecordedCall, ids: dict[int, int]) -> tuple[tuple[int, int], ...]:
    spans: list[tuple[int, int]] = []
    for block in np.frombuffer(call.blocks or b"", "<i8").tolist():
        number = ids.setdefault(block, len(ids))
        if spans and sum(spans[-1]) == number:
            spans[-1] = spans[-1][0], spans[-1][1] + 1
        else:
            spans.append((number, 1))
    return tuple(spans)


def _instance(one: Recording) -> str:
    return one.run.run_id if one.input is None else hashlib.sha256(one.input.encode()).hexdigest()[:16]


def _in_flight(recordings: Sequence[Recording]) -> int:
    """The most runs that were open at a time."""
    times = [(one.run.started_s, 1) for one in recordings] + [(one.run.ended_s, -1) for one in recordings]
    return int(np.max(np.cumsum([change for _, change in sorted(times)]), initial=1))

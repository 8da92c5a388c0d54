"""Traces of finished runs as training sets.

A trace is a gzipped or plain JSON-lines file: a `_meta` line, then a run a line. Per call `a` is the agent, `in` and
`out` its tokens. Traces of our own may have hidden states: `prefill` (last prefill token), `decode` (last decoded
token) and `inner` (an inner layer), in NAME.states.npz beside NAME.wf.jsonl.gz (`replay.recorded.state_arrays`), or in
the calls as `hp`, `hd`, `hi` (base64 of little-endian float16).
"""

import base64
import gzip
import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pbkv_ray.errors import InputError

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]

SIGNALS = {"prefill": "hp", "decode": "hd", "inner": "hi"}  # name of a hidden state -> its field in a trace
MASKED = -1  # label of a step after the run's end
_STAMP = re.compile(r"_\d{14}")


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """One finished run. `instance` is the task behind it: runs of one instance resemble each other.

    agents: names, one a call; prompt_tokens, output_tokens: [calls]; hidden: signal name -> [calls, width] float32.
    """

    run_id: str
    workflow: str
    instance: str
    agents: tuple[str, ...]
    prompt_tokens: Ints
    output_tokens: Ints
    hidden: dict[str, Floats] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """`sha256` is of the bytes of the file, and of the hidden states': it names the data a model was trained on."""

    name: str
    sha256: str
    runs: tuple[Run, ...]

    @property
    def workflows(self) -> tuple[str, ...]:
        return tuple(sorted({run.workflow for run in self.runs}))


def load(path: Path) -> Trace:
    """InputError when the file is absent, is no trace, or holds no run."""
    try:
        raw = path.read_bytes()
        text = gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw
        rows = [json.loads(line) for line in text.splitlines() if line.strip()]
    except (OSError, ValueError, EOFError) as error:
        raise InputError(f"trace {path} cannot be read ({error}); it must be JSON lines, gzipped or not") from error
    name = path.name.split(".")[0]
    try:
        runs = tuple(_run(row, name) for row in rows if "_meta" not in row and row["calls"])
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"trace {path} has a row without `id` and `calls` of `a`, `in`, `out` ({error!r})") from error
    if not runs:
        raise InputError(f"trace {path} holds no run; record some first (pbkv traces export)")
    digest = hashlib.sha256(raw)
    states = path.parent / f"{name}.states.npz"
    if states.is_file():
        digest.update(states.read_bytes())
        runs = _with_states(runs, states)
    return Trace(name, digest.hexdigest(), runs)


def _with_states(runs: Sequence[Run], path: Path) -> tuple[Run, ...]:
    """Signals that every call of every run has; a run that lacks one is left out of a trace where others have it."""
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        row = {
            (str(run), int(call)): i for i, (run, call) in enumerate(zip(arrays["run"], arrays["call"], strict=True))
        }
        known = {name: arrays["known"][:, i] for i, name in enumerate(("prefill", "decode"))}
        parts = []
        for run in runs:
            rows = np.array([row.get((run.run_id, number), -1) for number in range(len(run.agents))])
            hidden = {
                name: arrays[name][rows].astype(np.float32)
                for name, there in known.items()
                if (rows >= 0).all() and there[rows].all() and np.isfinite(arrays[name][rows]).all()
            }
            parts.append(replace(run, hidden=hidden | run.hidden))
    except (OSError, ValueError, KeyError, IndexError) as error:
        raise InputError(f"hidden states {path} cannot be read ({error}); export the trace again") from error
    signals = {name for run in parts for name in run.hidden}
    whole = tuple(run for run in parts if run.hidden.keys() == signals)
    return whole if len(whole) >= len(parts) / 2 else tuple(parts)


def _run(row: dict[str, Any], name: str) -> Run:
    calls = row["calls"]
    run_id = str(row["id"])
    hidden = {
        signal: np.stack([np.frombuffer(base64.b64decode(c[key]), "<f2").astype(np.float32) for c in calls])
        for signal, key in SIGNALS.items()
        if all(key in c for c in calls)
    }
    return Run(
        run_id=run_id,
        workflow=str(row.get("workflow") or row.get("wf") or name),
        # Logs of one task may be kept more than once (ChatDev: name, organisation, time, then a copy's number).
        instance=str(row.get("inst") or _STAMP.split(run_id)[0]),
        agents=tuple(str(c["a"]) for c in calls),
        prompt_tokens=np.array([c["in"] for c in calls], np.int64),
        output_tokens=np.array([c["out"] for c in calls], np.int64),
        hidden=hidden,
    )


def folds(runs: Sequence[Run], count: int, seed: int = 0) -> Ints:
    """[runs] the fold of each run: all runs of a task instance share one, folds have even numbers of instances,
    and the same runs always fall into the same folds. InputError with fewer instances than folds."""
    instances = _shuffled({run.instance for run in runs}, seed)
    if count < 2 or len(instances) < count:
        raise InputError(f"{len(instances)} task instances cannot make {count} folds; record more or ask for fewer")
    of = {instance: i % count for i, instance in enumerate(instances)}
    return np.array([of[run.instance] for run in runs], np.int64)


def sample(trace: Trace, instances: int, seed: int = 0) -> Trace:
    """The runs of so many task instances, all of them when there are fewer; which ones depends on `seed` alone."""
    kept = set(_shuffled({run.instance for run in trace.runs}, seed)[:instances])
    return Trace(trace.name, trace.sha256, tuple(run for run in trace.runs if run.instance in kept))


def _shuffled(instances: Iterable[str], seed: int) -> list[str]:
    return sorted(instances, key=lambda instance: hashlib.sha256(f"{seed}/{instance}".encode()).digest())


def vocabulary(runs: Iterable[Run]) -> tuple[str, ...]:
    return tuple(sorted({agent for run in runs for agent in run.agents}))


def labels(run: Run, agents: Sequence[str], horizon: int) -> Ints:
    """[calls, horizon]: after call t, who makes the k-th call from there: an index into `agents`, len(agents) for
    END, MASKED beyond the end. An agent that is not in `agents` is MASKED too: no model can be asked for it."""
    index = {agent: i for i, agent in enumerate(agents)}
    own = np.array([index.get(agent, MASKED) for agent in run.agents[1:]] + [len(agents)], np.int64)
    padded = np.concatenate((own, np.full(horizon, MASKED)))
    return np.lib.stride_tricks.sliding_window_view(padded, horizon)[: len(run.agents)]

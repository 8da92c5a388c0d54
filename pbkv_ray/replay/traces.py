"""Trace files: the public workload traces, Mooncake's hash-id traces, and our own recorded runs.

Our own format ("pbkv-runs", version 1) is JSON lines, gzipped when the name ends in .gz. Line 1 is `{"_meta":
{"format": "pbkv-runs", "version": 1, "dataset": ..., "block_tokens": 16, "in_flight": ...}}`, then one run a
line: `{"id", "inst", "wf", "start_s", "tags": {}, "calls": [{"a": agent, "s": session, "in": prompt tokens,
"out": output tokens, "b": [[first block id, count], ...], "t": arrival since the run's start in s,
"wait": s between the previous call's end and this arrival}]}`. Optional: wf, start_s, tags, t, wait.
"""

import gzip
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, cast

from pbkv_ray.errors import InputError
from pbkv_ray.replay.workload import BLOCK_TOKENS, TraceCall, TraceRun, Workload

IN_FLIGHT = {"acr": 16, "ag2_mathchat": 32, "coder": 16, "hyperagent": 16, "chatdev": 8}
Json = dict[str, Any]


def read_trace(path: str | Path, standard: bool = True) -> Workload:
    """Read any known trace. `standard` keeps the part that published figures use: of `acr` the set
    `acr-val-only` (its five sets share instances), of `hyperagent` the runs of at least five calls.

    Raises InputError when the file is missing, is no trace, or names the line that is broken.
    """
    path = Path(path)
    name = path.name.split(".")[0]
    if not path.is_file():
        raise InputError(f"there is no trace {str(path)!r}; give the path of a .jsonl or .jsonl.gz file")
    with _open(path, "rt") as file:
        rows = _rows(path, file)
        _, meta = next(rows, (0, {}))
        meta = meta.get("_meta", {})
        size = meta.get("block_tokens")
        if not isinstance(size, int) or size < BLOCK_TOKENS or size % BLOCK_TOKENS:
            raise InputError(
                f'{path.name}: line 1 must be {{"_meta": {{"block_tokens": N}}}} with N a multiple of '
                f"{BLOCK_TOKENS}, found {size!r}"
            )
        parsed = [_parse(path, number, row, name, size) for number, row in rows]
    if parsed and all(len(run.calls) == 1 and run.start_s is not None for run in parsed) and size > BLOCK_TOKENS:
        parsed = list(conversations(parsed))
    workload = Workload(name, tuple(run for run in parsed if run.calls), meta.get("in_flight", IN_FLIGHT.get(name, 16)))
    return _standard(workload) if standard else workload


def _standard(workload: Workload) -> Workload:
    if workload.name == "acr":
        return workload.where(lambda run: run.tags.get("run") == "acr-val-only")
    if workload.name == "hyperagent":
        return workload.where(lambda run: len(run.calls) >= 5)
    return workload


def _open(path: Path, mode: str) -> IO[str]:
    if path.suffix == ".gz":
        return cast("IO[str]", gzip.open(path, mode, encoding="utf-8"))
    return path.open(mode, encoding="utf-8")


def _rows(path: Path, file: Iterable[str]) -> Iterator[tuple[int, Json]]:
    number = 0
    try:
        for number, line in enumerate(file, 1):
            if line.strip():
                row = json.loads(line)
                if not isinstance(row, dict):
                    raise ValueError("not a JSON object")
                yield number, row
    except (ValueError, OSError, EOFError) as error:
        raise InputError(
            f"{path.name}: line {max(1, number)} cannot be read ({error}); is it a JSON lines trace?"
        ) from None


def _parse(path: Path, number: int, row: Json, name: str, size: int) -> TraceRun:
    try:
        if "calls" not in row:  # Mooncake: one request a line, t in milliseconds
            call = _call({"a": "user", "s": 0, **row, "t": None}, size)
            return TraceRun(f"{name}-{number}", str(number), name, (call,), start_s=row["t"] / 1000)
        calls = tuple(_call(item, size) for item in row["calls"] if item["in"] > 0)
        tags = {key: str(row[key]) for key in ("run", "cfg", "status", "exit", "ep") if key in row}
        return TraceRun(
            row["id"],
            str(row.get("inst", row["id"])),
            row.get("wf", name),
            calls,
            row.get("start_s"),
            tags | row.get("tags", {}),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"{path.name}: line {number} is no run ({error!r}); see pbkv_ray/replay/traces.py") from None


def _call(item: Json, size: int) -> TraceCall:
    scale = size // BLOCK_TOKENS
    left, spans = int(item["in"]) // size * scale, []
    for start, count in item["b"]:  # Mooncake lists the last, partly filled block too: keep the full ones
        if (taken := min(left, count * scale)) > 0:
            spans.append((int(start) * scale, taken))
            left -= taken
    return TraceCall(
        str(item["a"]),
        int(item.get("s", 0)),
        int(item["in"]),
        max(1, int(item["out"])),
        tuple(spans),
        item.get("t"),
        item.get("wait"),
    )


def conversations(requests: Sequence[TraceRun]) -> Iterator[TraceRun]:
    """Join single requests into runs: one that extends the full blocks of an earlier one continues it."""
    last: dict[int, int] = {}  # deepest full block of a conversation's last request -> conversation
    joined: list[list[TraceRun]] = []
    for request in sorted(requests, key=lambda r: r.start_s or 0.0):
        blocks = request.calls[0].blocks()[::-1].tolist()
        found = next((last[block] for block in blocks if block in last), None)
        if found is None:
            found = len(joined)
            joined.append([])
        elif joined[found]:
            last.pop(int(joined[found][-1].calls[0].blocks()[-1]), None)
        joined[found].append(request)
        if blocks:
            last[blocks[0]] = found
    for turns in joined:
        start = turns[0].start_s or 0.0
        calls = tuple(
            TraceCall(c.agent, c.session, c.prompt_tokens, c.output_tokens, c.spans, (turn.start_s or 0.0) - start)
            for turn in turns
            for c in turn.calls
        )
        yield TraceRun(turns[0].run_id, turns[0].instance, turns[0].workflow, calls, start)


def write_trace(path: str | Path, workload: Workload) -> None:
    """Write a workload in our own format; `read_trace(path, standard=False)` gives it back."""
    path = Path(path)
    with _open(path, "wt") as file:
        meta = {"format": "pbkv-runs", "version": 1, "dataset": workload.name, "block_tokens": BLOCK_TOKENS}
        file.write(json.dumps({"_meta": meta | {"in_flight": workload.in_flight}}) + "\n")
        for run in workload.runs:
            file.write(json.dumps(run_row(run), separators=(",", ":")) + "\n")


def run_row(run: TraceRun) -> Json:
    """One line of our own format."""
    calls = []
    for call in run.calls:
        row: Json = {
            "a": call.agent,
            "s": call.session,
            "in": call.prompt_tokens,
            "out": call.output_tokens,
            "b": [list(span) for span in call.spans],
        }
        if call.at_s is not None:
            row["t"] = call.at_s
        if call.wait_s is not None:
            row["wait"] = call.wait_s
        calls.append(row)
    row = {"id": run.run_id, "inst": run.instance, "wf": run.workflow}
    if run.start_s is not None:
        row["start_s"] = run.start_s
    if run.tags:
        row["tags"] = run.tags
    return row | {"calls": calls}


class BlockNames:
    """Names the 16-token blocks of prompts: the id of a block stands for the whole prompt up to its end."""

    def __init__(self) -> None:
        self._ids: dict[tuple[int, tuple[int, ...]], int] = {}

    def spans(self, tokens: Sequence[int]) -> tuple[tuple[int, int], ...]:
        """Token ids of a prompt -> run-length coded block ids of its full blocks."""
        spans: list[tuple[int, int]] = []
        parent = -1
        for i in range(0, len(tokens) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
            key = (parent, tuple(tokens[i : i + BLOCK_TOKENS]))
            parent = self._ids.setdefault(key, len(self._ids))
            if spans and spans[-1][0] + spans[-1][1] == parent:
                spans[-1] = (spans[-1][0], spans[-1][1] + 1)
            else:
                spans.append((parent, 1))
        return tuple(spans)

"""`pbkv traces record`: runs of one workflow on an engine of its own, kept as a trace with hidden states."""

import asyncio
import json
import time
from collections import Counter
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from pbkv_ray.cli.local import prepare_environment
from pbkv_ray.errors import InputError

POOL_TOKENS = 32_768
console = Console(stderr=True)


def record(
    workflow: Annotated[str, typer.Argument(help="hover, swe, finance, or one of yours")],
    out: Annotated[Path, typer.Argument(help="a .wf.jsonl or .wf.jsonl.gz file in our own format")],
    file: Annotated[Path | None, typer.Option(help="inputs in the workflow's own format; default: its samples")] = None,
    runs: Annotated[int, typer.Option(min=1, help="take the first so many inputs")] = 300,
    concurrency: Annotated[int, typer.Option(min=1, help="runs in flight")] = 12,
    minutes: Annotated[float, typer.Option(min=0.0, help="start no more runs after so long")] = 24 * 60.0,
    model: Annotated[str, typer.Option(help="'default', a local folder, or a hub id")] = "default",
    inner: Annotated[
        list[int] | None, typer.Option(help="take the states of these layers instead of the last one's, normed")
    ] = None,
) -> None:
    """Record runs at temperature 0: calls, times, tokens, blocks of prompts, and two hidden states a call."""
    prepare_environment()
    from deployments.recording import record_runs
    from pbkv_ray.config import EngineOptions
    from pbkv_ray.replay.recorded import export
    from workflows.registry import get

    inputs = _inputs(workflow, file, runs)
    if not out.absolute().parent.is_dir():
        raise InputError(f"the folder of {out} does not exist; make it first")
    options = EngineOptions(
        model,
        policy="lae",  # one of ours: others report nothing
        device_pool_tokens=POOL_TOKENS,
        host_pool_ratio=0.0,
        max_running_requests=max(16, concurrency),
        extra=inner_states(inner) if inner else {},
    )
    outcomes: Counter[str] = Counter()
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with TemporaryDirectory(prefix="pbkv-record-") as folder, Progress(*columns, console=console) as progress:
        bar = progress.add_task(workflow, total=len(inputs))

        def done(outcome: str) -> None:
            outcomes[outcome.partition(":")[0]] += 1
            if outcome != "completed":
                console.print(f"a run of {workflow} {outcome:.300}", markup=False)
            progress.advance(bar)

        database, began = f"sqlite+aiosqlite:///{folder}/runs.sqlite", list[float]()

        def may_start() -> bool:
            """The time counts from the first run: an engine can take minutes to start."""
            began[:] = began or [time.monotonic()]
            return time.monotonic() - began[0] <= 60 * minutes

        lost = asyncio.run(
            record_runs(
                get(workflow),
                inputs,
                options,
                database,
                concurrency=min(concurrency, len(inputs)),
                may_start=may_start,
                done=done,
            )
        )
        kept, states = export(database, out, workflow=workflow)
    result = {"trace": out.name, "runs": kept, "calls_with_states": states, "outcomes": outcomes, "lost": lost}
    print(json.dumps(result))


def inner_states(layers: list[int]) -> dict[str, object]:
    """What SGLang must be told to give these layers' states instead of the last one's."""
    return {
        "enable_return_aux_hidden_states": True,
        "speculative_algorithm": "EAGLE3",  # names how layers are counted; nothing speculates
        "return_aux_hidden_state_layer_ids": layers,
    }


def _inputs(workflow: str, file: Path | None, runs: int) -> list[dict[str, Any]]:
    from workflows.registry import get

    spec = get(workflow)
    if file is not None and not file.exists():
        raise InputError(f"--file {file} does not exist")
    inputs = list(islice(spec.samples() if file is None else spec.read(file), runs))
    if not inputs:
        raise InputError(f"{file} holds no input for {workflow}")
    return inputs

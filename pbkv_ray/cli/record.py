"""`pbkv traces record`: runs of one workflow on an application of its own, kept as a trace with hidden states."""

import asyncio
import json
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from pbkv_ray.cli.client import connect
from pbkv_ray.cli.local import free_port, serving
from pbkv_ray.errors import InputError, PbkvError

POOL_TOKENS = 32_768
STORED_S = 60  # how long to wait for the last runs to reach the store
console = Console(stderr=True)


def record(
    workflow: Annotated[str, typer.Argument(help="hover, swe, finance, or one of yours")],
    out: Annotated[Path, typer.Argument(help="a .wf.jsonl or .wf.jsonl.gz file in our own format")],
    file: Annotated[Path | None, typer.Option(help="inputs in the workflow's own format; default: its samples")] = None,
    runs: Annotated[int, typer.Option(min=1, help="take the first so many inputs")] = 300,
    concurrency: Annotated[int, typer.Option(min=1, help="runs in flight")] = 12,
    minutes: Annotated[float | None, typer.Option(min=0.0, help="start no more runs after so long")] = None,
    model: Annotated[str, typer.Option(help="'default', a local folder, or a hub id")] = "default",
    policy: Annotated[str, typer.Option(help="of the KV cache; one of ours, or there are no hidden states")] = "lae",
    inner: Annotated[
        list[int] | None, typer.Option(help="take the states of these layers instead of the last one's, normed")
    ] = None,
) -> None:
    """Record runs at temperature 0: calls, times, tokens, blocks of prompts, and two hidden states a call."""
    from pbkv_ray.replay.recorded import export

    inputs = _inputs(workflow, file, runs)
    if not out.absolute().parent.is_dir():
        raise InputError(f"the folder of {out} does not exist; make it first")
    extra: dict[str, Any] = {}
    if inner:
        extra = {
            "enable_return_aux_hidden_states": True,
            "speculative_algorithm": "EAGLE3",  # names how layers are counted; nothing speculates
            "return_aux_hidden_state_layer_ids": inner,
        }
    with TemporaryDirectory(prefix="pbkv-record-") as folder:
        database = f"sqlite+aiosqlite:///{folder}/runs.sqlite"
        args = {
            "model": model,
            "policy": policy,
            "database": database,
            "device_pool_tokens": POOL_TOKENS,
            "record": True,
            "engine_extra": extra,
        }
        with serving(args, "127.0.0.1", port := free_port()):
            url = f"http://127.0.0.1:{port}"
            statuses = asyncio.run(_run_all(url, workflow, inputs, concurrency, minutes))
            asyncio.run(_stored(database, statuses.count("success")))
        done, states = export(database, out, workflow=workflow)
    result = {status: statuses.count(status) for status in sorted(set(statuses))}
    print(json.dumps({"trace": out.name, "runs": done, "calls_with_states": states, "statuses": result}))


def _inputs(workflow: str, file: Path | None, runs: int) -> list[dict[str, Any]]:
    from workflows.registry import get

    spec = get(workflow)
    if file is not None and not file.exists():
        raise InputError(f"--file {file} does not exist")
    inputs = list(islice(spec.samples() if file is None else spec.read(file), runs))
    if not inputs:
        raise InputError(f"{file} holds no input for {workflow}")
    return inputs


async def _run_all(
    url: str, workflow: str, inputs: list[dict[str, Any]], concurrency: int, minutes: float | None
) -> list[str]:
    """The statuses of the runs. One that fails is one status: the recording goes on."""
    waiting: Iterator[dict[str, Any]] = iter(inputs)
    stop_s = time.monotonic() + (minutes * 60 if minutes is not None else float("inf"))
    client, statuses = connect(url), list[str]()
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task(workflow, total=len(inputs))

        async def work() -> None:
            for one in waiting:
                if time.monotonic() > stop_s:
                    return
                try:
                    thread = await client.threads.create()
                    run = await client.runs.create(thread["thread_id"], workflow, input=one)
                    await client.runs.join(thread["thread_id"], run["run_id"])
                    statuses.append((await client.runs.get(thread["thread_id"], run["run_id"]))["status"])
                except Exception as error:
                    console.print(f"a run of {workflow} failed: {error}")
                    statuses.append("refused")
                progress.advance(bar)

        async with asyncio.TaskGroup() as group:
            for _ in range(min(concurrency, len(inputs))):
                group.create_task(work())
    return statuses


async def _stored(database: str, runs: int) -> None:
    """Until the store has so many runs. PbkvError when it never does: the controller's log says why."""
    from pbkv_ray.store import Store

    store = await Store.open(database)
    try:
        for _ in range(2 * STORED_S):
            if (there := await store.recordings.count()) >= runs:
                return
            await asyncio.sleep(0.5)
        raise PbkvError(f"of {runs} runs only {there} reached the store in {STORED_S} s")
    finally:
        await store.close()

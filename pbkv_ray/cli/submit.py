"""`pbkv submit`: runs of one workflow against a running application, with a live progress bar."""

import asyncio
import json
import sys
from collections.abc import Iterable, Sequence
from itertools import islice
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from pbkv_ray.cli.client import DEFAULT_URL, Url, connect, explained
from pbkv_ray.cli.local import Registry, workflows_of
from pbkv_ray.cli.report import RunReport, as_table, print_failures, print_table, report_run
from pbkv_ray.errors import InputError
from workflows.records import records

Job = tuple[str, dict[str, Any]]  # workflow, input


def submit(
    workflow: Annotated[str, typer.Argument(help="hover, swe, finance, or one of yours")],
    input: Annotated[str | None, typer.Option(help="one input, as JSON")] = None,
    file: Annotated[Path | None, typer.Option(help="inputs in the workflow's own file format, or JSON lines")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="take the first so many inputs")] = None,
    concurrency: Annotated[int, typer.Option(min=1, help="runs in flight")] = 4,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON instead of the table")] = False,
    registry: Registry = None,
    url: Url = DEFAULT_URL,
) -> None:
    """Submit runs and wait for them. Without --input and --file, the workflow's own samples."""
    inputs = list(islice(_inputs(workflow, input, file, registry), limit))
    if not inputs:
        raise InputError(f"{file or 'the registry'} holds no input for {workflow}; give --input or --file")
    reports = asyncio.run(run_jobs(url, [(workflow, one) for one in inputs], concurrency, quiet=as_json))
    if as_json:
        json.dump({"runs": [run.as_json() for run in reports]}, sys.stdout, indent=1)
        print()
    else:
        print_table(as_table(reports))
    print_failures(reports)
    if any(run.status != "success" for run in reports):
        raise typer.Exit(1)


def _inputs(workflow: str, text: str | None, file: Path | None, registry: str | None) -> Iterable[dict[str, Any]]:
    """The server checks them; here only what reads the file and makes the samples must be known."""
    if text is not None and file is not None:
        raise InputError("--input and --file were both given; name one")
    if text is not None:
        try:
            value = json.loads(text)
        except ValueError as error:
            raise InputError(f"--input is no JSON: {error}") from error
        if not isinstance(value, dict):
            raise InputError(f"--input is a JSON {type(value).__name__}; it must be an object")
        return [value]
    if file is not None and not file.exists():
        raise InputError(f"--file {file} does not exist")
    specs = {spec.name: spec for spec in workflows_of(registry)}
    if (spec := specs.get(workflow)) is not None:
        return spec.samples() if file is None else spec.read(file)
    if file is not None:
        return records(file)
    raise InputError(
        f"workflow {workflow!r} is not one of {', '.join(sorted(specs))}, whose samples are known here; give --input, "
        "--file, or for the samples of your own --registry module:attribute"
    )


async def run_jobs(url: str, jobs: Sequence[Job], concurrency: int, *, quiet: bool = False) -> list[RunReport]:
    """Runs all jobs, `concurrency` at a time; reports in the order of `jobs`."""
    free = asyncio.Semaphore(concurrency)
    progress = Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
        TextColumn("{task.fields[now]}"), disable=quiet, console=Console(stderr=True),
    )  # fmt: skip
    bars: dict[str, TaskID] = {}

    async def one(workflow: str, value: dict[str, Any]) -> RunReport:
        async with free:
            started_s = perf_counter()
            thread = await client.threads.create()
            run = await client.runs.create(thread["thread_id"], workflow, input=value, stream_mode="updates")
            async for part in client.runs.join_stream(thread["thread_id"], run["run_id"]):
                if part.event.startswith("updates") and part.data:
                    progress.update(bars[workflow], now=f"{run['run_id'][:8]} {next(iter(part.data))}")
            report = await report_run(client, workflow, thread["thread_id"], run["run_id"], perf_counter() - started_s)
            progress.advance(bars[workflow])
            return report

    with explained(url), progress:
        client = connect(url)
        for workflow, _ in jobs:
            if workflow not in bars:
                total = sum(name == workflow for name, _ in jobs)
                bars[workflow] = progress.add_task(workflow, total=total, now="")
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(*job)) for job in jobs]
    return [task.result() for task in tasks]

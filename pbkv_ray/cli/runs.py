"""`pbkv runs`: look at runs of a running application, and stop them."""

import asyncio
import json
from collections.abc import Awaitable
from typing import Annotated, Any, TypeVar

import typer
from rich.console import Console
from rich.table import Table

from pbkv_ray.cli.client import DEFAULT_URL, Url, connect, explained
from pbkv_ray.cli.report import print_table
from pbkv_ray.errors import NotFoundError

app = typer.Typer(no_args_is_help=True, help=__doc__)
T = TypeVar("T")


def _ask(url: str, answer: Awaitable[T]) -> T:
    async def wait() -> T:
        return await answer

    with explained(url):
        return asyncio.run(wait())


async def _recent(url: str, limit: int, status: str | None) -> list[dict[str, Any]]:
    params: dict[str, Any] = {"limit": limit} | ({"status": status} if status else {})
    runs: list[dict[str, Any]] = await connect(url).http.get("/v1/runs", params=params)
    return runs


@app.command("list")
def list_runs(
    limit: Annotated[int, typer.Option(min=1, max=1000)] = 20,
    status: Annotated[str | None, typer.Option(help="pending, running, success, error, interrupted")] = None,
    as_json: Annotated[bool, typer.Option("--json")] = False,
    url: Url = DEFAULT_URL,
) -> None:
    """The newest runs."""
    runs = _ask(url, _recent(url, limit, status))
    if as_json:
        print(json.dumps(runs, indent=1))
        return
    table = Table("run", "workflow", "status", "created", "thread")
    for run in runs:
        workflow = run.get("metadata", {}).get("graph_id") or run.get("assistant_id", "")
        table.add_row(run["run_id"], str(workflow), run["status"], run["created_at"], run["thread_id"])
    print_table(table)


async def _one(url: str, run_id: str) -> dict[str, Any]:
    client = connect(url)
    found: dict[str, Any] = await client.http.get(f"/v1/runs/{run_id}")
    found["calls"] = await client.http.get(f"/v1/runs/{run_id}/calls")
    return found


@app.command()
def show(run_id: str, url: Url = DEFAULT_URL) -> None:
    """One run and its LLM calls, as JSON."""
    print(json.dumps(_ask(url, _one(url, run_id)), indent=1))


async def _cancel(url: str, run_id: str) -> None:
    client = connect(url)
    found: dict[str, Any] = await client.http.get(f"/v1/runs/{run_id}")
    if not found.get("thread_id"):
        raise NotFoundError(f"run {run_id} has no thread any more; it ended")
    await client.runs.cancel(found["thread_id"], run_id, wait=True)


@app.command()
def cancel(run_id: str, url: Url = DEFAULT_URL) -> None:
    """Stop a run, and the LLM call that it is in."""
    _ask(url, _cancel(url, run_id))
    Console().print(f"{run_id} was asked to stop")

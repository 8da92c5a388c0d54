"""`pbkv runs`: look at runs of a running application, and stop them."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Annotated, Any, TypeVar

import typer
from langgraph_sdk.client import LangGraphClient
from rich.box import SIMPLE_HEAD
from rich.table import Table

from pbkv_ray.cli.client import DEFAULT_URL, Url, connect, explained
from pbkv_ray.cli.report import print_table
from pbkv_ray.errors import InputError

app = typer.Typer(no_args_is_help=True, help="Look at runs of a running application, and stop them.")
RunId = Annotated[str, typer.Argument(help="the run's id, or its first characters")]
Json = Annotated[bool, typer.Option("--json", help="print JSON")]
ID_LENGTH = 36
SEARCHED = 1_000  # the newest runs, for one whose id is not given in full
T = TypeVar("T")


def _ask(url: str, ask: Callable[[LangGraphClient], Awaitable[T]]) -> T:
    async def wait() -> T:
        return await ask(connect(url))

    with explained(url):
        return asyncio.run(wait())


async def _recent(client: LangGraphClient, limit: int, status: str | None = None) -> list[dict[str, Any]]:
    params: dict[str, Any] = {"limit": limit} | ({"status": status} if status else {})
    runs: list[dict[str, Any]] = await client.http.get("/v1/runs", params=params)
    return runs


async def _find(client: LangGraphClient, run_id: str) -> dict[str, Any]:
    """The run of this id, or the only recent one whose id begins so. Raises InputError when several do."""
    if len(run_id) < ID_LENGTH:
        found = [run for run in await _recent(client, SEARCHED) if run["run_id"].startswith(run_id)]
        if len(found) > 1:
            raise InputError(f"{len(found)} runs begin with {run_id!r}; give more of the id")
        run_id = found[0]["run_id"] if found else run_id
    one: dict[str, Any] = await client.http.get(f"/v1/runs/{run_id}")
    return one


@app.command("list")
def list_runs(
    limit: Annotated[int, typer.Option(min=1, max=1000)] = 20,
    status: Annotated[str | None, typer.Option(help="pending, running, success, error, interrupted")] = None,
    as_json: Json = False,
    url: Url = DEFAULT_URL,
) -> None:
    """The newest runs."""
    runs = _ask(url, lambda client: _recent(client, limit, status))
    if as_json:
        print(json.dumps(runs, indent=1))
        return
    table = _table("run", "workflow", "status", "created", "seconds")
    for run in runs:
        seconds = f"{run['seconds']:.1f}" if "seconds" in run else ""
        table.add_row(run["run_id"], run.get("workflow", ""), run["status"], _time(run["created_at"]), seconds)
    print_table(table)


def _table(*names: str) -> Table:
    table = Table(header_style="bold", box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for name in names:
        table.add_column(name, no_wrap=True)
    return table


def _time(iso: str) -> str:
    return iso[:19].replace("T", " ")


async def _one(client: LangGraphClient, run_id: str) -> tuple[dict[str, Any], dict[int, list[dict[str, Any]]]]:
    """The run with its calls and, once it has succeeded, what it answered; and each call's missed spans."""
    found = await _find(client, run_id)
    run_id = found["run_id"]
    found["calls"] = await client.http.get(f"/v1/runs/{run_id}/calls")
    if found["status"] == "success" and found.get("thread_id"):
        found["output"] = await client.runs.join(found["thread_id"], run_id)
    kv: dict[str, Any] = await client.http.get(f"/v1/runs/{run_id}/kv")
    return found, {call["order"]: call["missed"] or [] for call in kv["calls"]}


@app.command()
def show(run_id: RunId, as_json: Json = False, url: Url = DEFAULT_URL) -> None:
    """One run: its LLM calls, what each found in the cache and why it did not find the rest, and its answer."""
    run, missed = _ask(url, lambda client: _one(client, run_id))
    if as_json:
        print(json.dumps(run, indent=1))
        return
    table = _table("call", "agent", "prompt", "device", "host", "output", "seconds")
    table.add_column("not found")
    for call in run["calls"]:
        spans = missed.get(call["order"], [])
        why = ", ".join(f"{span['end'] - span['start']:,} {span['cause']} from {span['start']:,}" for span in spans)
        tokens = [f"{call[name]:,}" for name in ("prompt_tokens", "device_cached_tokens", "host_cached_tokens")]
        output, seconds = f"{call['output_tokens']:,}", f"{call['seconds']:.1f}"
        table.add_row(str(call["order"]), call["agent"], *tokens, output, seconds, why)
    took = f", {run['seconds']:.1f} s" if "seconds" in run else ""
    print(f"{run['run_id']}  {run.get('workflow', '')}  {run['status']}{took}")
    print_table(table)
    for name in ("error", "output"):
        if name in run:
            print(f"{name}: {json.dumps(run[name], indent=1, ensure_ascii=False)}")


async def _cancel(client: LangGraphClient, run_id: str) -> str:
    found = await _find(client, run_id)
    if found["status"] not in ("pending", "running"):
        return f"{found['run_id']} has ended already: {found['status']}"
    await client.runs.cancel(found["thread_id"], found["run_id"], wait=True)
    return f"{found['run_id']} was asked to stop"


@app.command()
def cancel(run_id: RunId, url: Url = DEFAULT_URL) -> None:
    """Stop a run, and the LLM call that it is in."""
    print(_ask(url, lambda client: _cancel(client, run_id)))

"""One row a run: what it called, what that cost, what the cache gave."""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from langgraph_sdk.client import LangGraphClient
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

FILE_WIDTH = 120  # columns of a table that no terminal shows


@dataclass(frozen=True, slots=True)
class RunReport:
    """`status` is LangGraph's; tokens are sums over the run's calls; `seconds` run from submission to the end; `error`
    is why it failed."""

    run_id: str
    workflow: str
    status: str
    agents: list[str]
    calls: int
    prompt_tokens: int
    device_cached_tokens: int
    host_cached_tokens: int
    output_tokens: int
    seconds: float
    error: str = ""

    def as_json(self) -> dict[str, Any]:
        """Without `error` where there is none."""
        return {name: value for name, value in asdict(self).items() if name != "error" or value}


async def report_run(client: LangGraphClient, workflow: str, thread_id: str, run_id: str, seconds: float) -> RunReport:
    run = await client.runs.get(thread_id, run_id)
    calls: list[dict[str, Any]] = await client.http.get(f"/v1/runs/{run_id}/calls")

    def total(name: str) -> int:
        return sum(int(call[name]) for call in calls)

    return RunReport(
        run_id=run_id,
        workflow=workflow,
        status=run["status"],
        agents=[call["agent"] for call in calls],
        calls=len(calls),
        prompt_tokens=total("prompt_tokens"),
        device_cached_tokens=total("device_cached_tokens"),
        host_cached_tokens=total("host_cached_tokens"),
        output_tokens=total("output_tokens"),
        seconds=round(seconds, 3),
        error=": ".join((run.get("error") or {}).values()),  # type: ignore[attr-defined]
    )


def as_table(reports: Sequence[RunReport]) -> Table:
    """Fits 80 columns: only the agents called are folded."""
    table = Table(header_style="bold", box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for name in ("run", "workflow", "status"):
        table.add_column(name, no_wrap=True)
    table.add_column("agents called", ratio=1)
    for name in ("calls", "prompt", "device", "host", "seconds"):
        table.add_column(name, justify="right", no_wrap=True)
    for run in reports:
        table.add_row(
            run.run_id[:8],
            run.workflow,
            run.status if run.status == "success" else f"[red]{run.status}[/]",
            _path(run.agents),
            str(run.calls),
            f"{run.prompt_tokens:,}",
            _share(run.device_cached_tokens, run.prompt_tokens),
            _share(run.host_cached_tokens, run.prompt_tokens),
            f"{run.seconds:.1f}",
        )
    table.caption = "device, host: share of the prompt tokens that this tier of the KV cache held"
    return table


def print_failures(reports: Sequence[RunReport]) -> None:
    """On standard error, a line a run that did not succeed."""
    for run in reports:
        if run.status != "success":
            print(f"{run.run_id}: {run.error or run.status}", file=sys.stderr)


def print_json(value: Any, file: Path | None) -> None:
    """On standard output, and in `file` if one is named."""
    text = json.dumps(value, indent=1)
    print(text)
    if file is not None:
        file.write_text(text + "\n")


def print_table(table: Table) -> None:
    """On standard output, in the terminal's width if there is one."""
    Console(width=None if sys.stdout.isatty() else FILE_WIDTH).print(table)


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.0%}" if whole else "-"


def _path(agents: Sequence[str]) -> str:
    """`a > b x2 > c`: repeats in a row are folded."""
    folded: list[list[Any]] = []
    for agent in agents:
        if folded and folded[-1][0] == agent:
            folded[-1][1] += 1
        else:
            folded.append([agent, 1])
    return " > ".join(agent if count == 1 else f"{agent} x{count}" for agent, count in folded)

"""`pbkv policy`: which cache policy the engines follow, and the kill switch."""

import json
import os
from typing import Annotated, Any

import httpx
import typer
from rich.console import Console
from rich.table import Table

from pbkv_ray.cli.client import DEFAULT_URL, Url, explained
from pbkv_ray.config import SERVED_POLICIES
from pbkv_ray.errors import UnavailableError

app = typer.Typer(help="Look at the engines' cache policy, or change it while they serve.", no_args_is_help=True)
SWITCHED = tuple(name for name in SERVED_POLICIES if name != "session")  # that one is another cache class of SGLang
Json = Annotated[bool, typer.Option("--json", help="print JSON")]


@app.command("show")
def show(url: Url = DEFAULT_URL, as_json: Json = False) -> None:
    """Who decides what leaves each cache, and what plain LRU would have hit."""
    _print(_ask("GET", url), as_json)


@app.command("set")
def choose(
    policy: Annotated[str, typer.Argument(help=f"one of {', '.join(SWITCHED)}")],
    replica: Annotated[str | None, typer.Option(help="one replica; default: all")] = None,
    url: Url = DEFAULT_URL,
    as_json: Json = False,
) -> None:
    """Put a policy in charge at once, without a restart. Ends with 1 if an engine did not obey."""
    answer = _ask("PUT", url, {"policy": policy, "replica": replica})
    _print(answer, as_json)
    if failed := [f"{name}: {state['error']}" for name, state in answer["replicas"].items() if "error" in state]:
        raise UnavailableError("; ".join(failed))


def _ask(method: str, url: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    headers = {"x-api-key": key} if (key := os.environ.get("PBKV_API_KEY")) else {}
    with explained(url):
        response = httpx.request(method, f"{url.rstrip('/')}/v1/policy", json=body, headers=headers, timeout=30.0)
        response.raise_for_status()
        found: dict[str, Any] = response.json()
        return found


def _print(answer: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(answer))
        return
    table = Table("replica", "policy", "in charge", "hit", "LRU's shadow", "fallbacks")
    for replica, state in sorted(answer["replicas"].items()):
        prompt = state.get("prompt", 0)
        shares = [f"{state[name] / prompt:.3f}" if prompt else "" for name in ("hit", "lru")]
        table.add_row(
            replica, state["policy"], state.get("state", ""), *shares, str(state.get("fallbacks", "")), style="bold"
        )
    Console().print(table)

"""`pbkv serve` and `pbkv demo`: the whole application on this machine."""

import asyncio
import json
import os
import secrets
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from pbkv_ray.config import SERVED_POLICIES
from pbkv_ray.errors import InputError

if TYPE_CHECKING:
    from deployments.registry import Workflows

Model = Annotated[str, typer.Option(help="'default' (SmolLM2-135M-Instruct), a local folder, or a hub id")]
Policy = Annotated[str, typer.Option(help=f"which KV-cache policy the engines follow: {', '.join(SERVED_POLICIES)}")]
Registry = Annotated[
    str | None, typer.Option(help="your own workflows, as module:attribute; modules of this folder are found")
]
console = Console(stderr=True)


def serve(
    model: Model = "default",
    policy: Policy = "pbkv+",
    replicas: Annotated[int, typer.Option(min=1, help="engine replicas")] = 1,
    host: Annotated[str, typer.Option(help="beyond loopback, API keys are required")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535)] = 8000,
    database: Annotated[str | None, typer.Option(help="SQLAlchemy URL; a SQLite file by default")] = None,
    api_keys: Annotated[Path | None, typer.Option(help="file of API keys, one a line")] = None,
    models: Annotated[
        Path | None, typer.Option(help="folder of predictor models, one folder of pbkv train each")
    ] = None,
    record: Annotated[bool, typer.Option(help="keep every run's calls for pbkv traces export")] = False,
    registry: Registry = None,
) -> None:
    """Serve the workflows over HTTP until interrupted."""
    args: dict[str, Any] = {"model": model, "policy": policy, "engine_replicas": replicas, "host": host}
    args |= {"database": database} if database else {}
    args |= {"api_keys_file": str(api_keys)} if api_keys else {}
    args |= {"record": record} | ({"predictor_models": str(models)} if models else {})
    if registry is not None:
        workflows_of(registry)  # what is wrong with it is said before anything starts
        args |= {"registry": registry}
    with serving(args, host, port) as url:
        console.print(f"ready at {url}  (a page to watch: {url}/, API: {url}/docs); Ctrl-C stops it")
        stop = threading.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: stop.set())
        stop.wait()
        console.print("stopping; runs in flight go on at the next start")


def demo(
    runs: Annotated[int, typer.Option(min=1, help="runs of each workflow")] = 3,
    model: Model = "default",
    policy: Policy = "pbkv+",
    json_file: Annotated[Path | None, typer.Option("--json", help="also write the runs to this file")] = None,
) -> None:
    """Run samples of every workflow at the same time, on a real engine, and show what they did."""
    from pbkv_ray.cli.report import as_table, print_failures, print_table
    from pbkv_ray.cli.submit import run_jobs
    from workflows.registry import REGISTRY

    if json_file is not None and not json_file.absolute().parent.is_dir():
        raise InputError(f"--json {json_file}: its folder does not exist")
    jobs = [(name, one) for name, spec in REGISTRY.items() for one in islice(spec.samples(), runs)]
    with TemporaryDirectory(prefix="pbkv-demo-") as folder:
        database = f"sqlite+aiosqlite:///{folder}/runs.sqlite"
        with serving({"model": model, "policy": policy, "database": database}, "127.0.0.1", free_port()) as url:
            console.print(f"{len(jobs)} runs of {', '.join(REGISTRY)}, all at once")
            reports = asyncio.run(run_jobs(url, jobs, concurrency=len(jobs)))
    print_table(as_table(reports))
    print_failures(reports)
    if json_file is not None:
        json_file.write_text(json.dumps({"runs": [run.as_json() for run in reports]}, indent=1) + "\n")
    if any(run.status != "success" for run in reports):
        raise typer.Exit(1)


def workflows_of(registry: str | None) -> "Workflows":
    """Ray's workers look into the folder that it was started from; so must we. Raises ConfigError."""
    from deployments.registry import Workflows
    from deployments.settings import REGISTRY

    sys.path.insert(0, str(Path.cwd()))
    return Workflows(registry or REGISTRY)


def prepare_environment() -> None:
    """What Ray reads when it is first imported; what the user has set stays.

    The token is made here: Ray 2.60 makes a missing one itself, but only after its processes have read none.
    """
    os.environ.setdefault("RAY_AUTH_MODE", "token")  # Ray's ports are remote code execution
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_gcs_server_port_wait_time_s", "120")  # two busy cores can need more than 30 s
    os.environ.setdefault("RAY_worker_niceness", "0")  # engines are Ray workers; Ray would run them at 15
    token = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")
    if os.environ["RAY_AUTH_MODE"] == "token" and "RAY_AUTH_TOKEN" not in os.environ and not token.exists():
        token.parent.mkdir(parents=True, exist_ok=True)
        with (
            suppress(FileExistsError),
            os.fdopen(os.open(token, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file,
        ):
            file.write(secrets.token_hex(32))


@contextmanager
def serving(args: dict[str, Any], host: str, port: int) -> Iterator[str]:
    """Ray, the application, and at the end neither. Yields the address."""
    prepare_environment()
    from deployments.app import run_local, stop_local
    from deployments.settings import AppArgs

    if not _is_free(host, port):
        raise InputError(f"port {port} of {host} is taken; name another with --port")
    checked = AppArgs.checked(args)
    try:  # stopped in an orderly way also when it is interrupted while it starts: Ray's own end is a crash then
        with console.status("starting Ray and the engine (a minute on two cores, more the first time)"):
            run_local(checked, host, port)
        yield f"http://{'127.0.0.1' if host == '0.0.0.0' else host}:{port}"
    finally:
        with console.status("stopping"):
            stop_local()


def _is_free(host: str, port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
        return True


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port

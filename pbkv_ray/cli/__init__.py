"""The `pbkv` command. Each subcommand lives beside what it drives and is imported only when it runs."""

import sys
import warnings

import typer
from rich.console import Console

from pbkv_ray.errors import PbkvError

HELP = "LangGraph workflows behind HTTP, on SGLang engines that keep in the KV cache what is used next."
errors = Console(stderr=True)


def build_app() -> typer.Typer:
    """The command with all its subcommands."""
    from pbkv_ray.cli import controller, local, overhead, policy, record, routing, runs, submit
    from pbkv_ray.predict import cli as predict
    from pbkv_ray.replay import bench_cli, bench_routing
    from pbkv_ray.replay import cli as replay
    from pbkv_ray.replay.bench_cli import bench_app

    app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=HELP)
    app.command("serve")(local.serve)
    app.command("demo")(local.demo)
    app.command("submit")(submit.submit)
    app.command("train")(predict.train)
    app.command("evaluate")(predict.evaluate)
    app.command("report")(replay.report_command)
    app.add_typer(runs.app, name="runs")
    app.add_typer(policy.app, name="policy")
    app.add_typer(replay.replay_app, name="replay")
    replay.traces_app.command("record")(record.record)
    app.add_typer(replay.traces_app, name="traces")
    bench_cli.bench_app.command("overhead")(overhead.overhead)
    bench_cli.bench_app.command("routing")(routing.routing)
    replay.replay_app.command("routing")(bench_routing.routing_command)
    bench_cli.bench_app.command("controller")(controller.controller)
    app.add_typer(bench_cli.bench_app, name="bench")
    app.add_typer(bench_app, name="bench")
    return app


def main() -> None:
    """Ends with 0, with 1 when something of ours failed, with 2 when the request was wrong."""
    # SGLang warns at each import of kernels that a machine without its GPU cannot have.
    warnings.filterwarnings("ignore", category=UserWarning, module=r"(sglang|torch|transformers)\b")
    try:
        build_app()()
    except PbkvError as error:
        errors.print(f"pbkv: {error}", style="red", markup=False, highlight=False)
        sys.exit(error.exit_code)

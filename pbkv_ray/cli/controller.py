"""`pbkv bench controller`."""

from pathlib import Path
from typing import Annotated

import typer

from pbkv_ray.cli.local import prepare_environment
from pbkv_ray.cli.report import print_json


def controller(
    rate: Annotated[int, typer.Option(min=1, help="events a second, over all sources")] = 50_000,
    seconds: Annotated[float, typer.Option(min=1.0)] = 20.0,
    sources: Annotated[int, typer.Option(min=1, help="runners and gateways that send")] = 4,
    batch: Annotated[int, typer.Option(min=1, help="events of a batch: what a pump sends at most")] = 4_096,
    json_file: Annotated[Path | None, typer.Option("--json", help="write the result there")] = None,
) -> None:
    """How many events a real controller actor takes, how long a batch takes it, and whether its memory grows."""
    prepare_environment()
    from deployments.bench_controller import measure

    print_json(measure(rate, seconds, sources, batch), json_file)

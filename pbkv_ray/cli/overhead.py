"""`pbkv bench overhead`."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress

from pbkv_ray.cli.local import prepare_environment
from pbkv_ray.cli.report import print_json


def overhead(
    model: Annotated[str, typer.Option(help="'tiny' (random weights), 'default', a folder or a hub id")] = "tiny",
    calls: Annotated[int, typer.Option(min=1, help="of each kind")] = 100,
    words: Annotated[int, typer.Option(min=1, help="of the prompt")] = 60,
    output_tokens: Annotated[int, typer.Option(min=1)] = 32,
    json_file: Annotated[Path | None, typer.Option("--json", help="write the result there")] = None,
) -> None:
    """What our stack adds to one LLM call, over the same call on the bare engine, alternating in one run."""
    prepare_environment()
    from deployments.bench_overhead import measure

    with Progress(console=Console(stderr=True)) as progress:
        bar = progress.add_task("calls", total=calls)
        result = measure(model, calls, words, output_tokens, lambda done: progress.update(bar, completed=done + 1))
    print_json(result, json_file)

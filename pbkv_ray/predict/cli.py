"""`pbkv train` and `pbkv evaluate`: plain functions, mounted by `pbkv_ray.cli`."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from pbkv_ray.predict import dataset

console = Console()

TraceFile = Annotated[Path, typer.Option("--trace", help="JSON lines of runs, gzipped or not.")]
Threads = Annotated[int, typer.Option(help="CPU threads of torch.")]


def train(
    trace: TraceFile,
    out: Annotated[Path, typer.Option(help="Folder of the model; one there is replaced.")],
    workflow: Annotated[str | None, typer.Option(help="Only its runs (a model serves one workflow).")] = None,
    epochs: Annotated[int, typer.Option(min=1)] = 30,
    patience: Annotated[int, typer.Option(min=1, help="Epochs without a better validation loss.")] = 5,
    seed: int = 0,
    signals: Annotated[list[str] | None, typer.Option(help="Hidden states to read: prefill, decode, inner.")] = None,
    threads: Threads = 1,
) -> None:
    """Train the net of one workflow on a trace; a fifth of the task instances stops it early and calibrates it."""
    import torch

    from pbkv_ray.errors import InputError
    from pbkv_ray.predict.baselines import mixtures
    from pbkv_ray.predict.graphsage import NetOptions
    from pbkv_ray.predict.train import TrainOptions, evaluate_held, fit, save

    torch.set_num_threads(threads)
    data = dataset.load(trace)
    name = workflow or data.workflows[0]
    runs = [run for run in data.runs if run.workflow == name]
    if workflow is None and len(data.workflows) > 1:
        raise InputError(f"trace {trace} holds {', '.join(data.workflows)}; say which with --workflow")
    if not runs:
        raise InputError(f"trace {trace} has no run of {workflow!r}; it holds {', '.join(data.workflows)}")
    part = dataset.folds(runs, 5, seed)
    validation = [run for run, fold in zip(runs, part, strict=True) if fold == 0]
    rest = [run for run, fold in zip(runs, part, strict=True) if fold != 0]
    widths = {}
    for signal in signals or ():
        if signal not in runs[0].hidden:
            raise InputError(f"trace {trace} has no hidden state {signal!r}; record it or train without it")
        widths[signal] = runs[0].hidden[signal].shape[1]
    options = TrainOptions(epochs=epochs, patience=patience, seed=seed)
    with _progress() as bar:
        task = bar.add_task("training", total=epochs)

        def epoch(index: int, loss: float) -> None:
            bar.update(task, completed=index + 1, description=f"validation loss {loss:.4f}")

        model = fit(rest, validation, NetOptions(1, signals=widths), options, epoch)
    facts = {"workflow": name, "data": trace.name, "data_sha256": data.sha256}
    measured = evaluate_held(model, validation)
    save(model, out, {**facts, **mixtures(model, rest, validation), "metrics": measured})
    console.print(
        f"{out}: {model.facts['parameters']:,} parameters, {len(runs)} runs of {name}, "
        f"next agent right {measured['top1'][0]:.3f} of validation"
    )


def evaluate(
    trace: TraceFile,
    folds: Annotated[int, typer.Option(min=2)] = 5,
    json_file: Annotated[Path | None, typer.Option("--json", help="Where the figures go.")] = None,
    model: Annotated[list[str] | None, typer.Option(help="Only these models.")] = None,
    instances: Annotated[int | None, typer.Option(min=2, help="Only so many task instances.")] = None,
    epochs: Annotated[int, typer.Option(min=1)] = 30,
    seed: int = 0,
    threads: Threads = 1,
) -> None:
    """Compare all predictors on a trace: k folds, split by task instance."""
    import torch

    from pbkv_ray.predict.evaluate import evaluate as compare
    from pbkv_ray.predict.train import TrainOptions

    torch.set_num_threads(threads)
    data = dataset.load(trace)
    if instances is not None:
        data = dataset.sample(data, instances, seed)
    with _progress() as bar:
        task = bar.add_task(data.name, total=None)

        def fitted(name: str) -> None:
            bar.update(task, advance=1, description=name)

        figures = compare(data, folds, model or (), TrainOptions(epochs=epochs, seed=seed), seed, fitted)
    if json_file is not None:
        json_file.write_text(json.dumps(figures, indent=1) + "\n")
    console.print(_table(figures))


def _progress() -> Progress:
    return Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=console
    )


def _table(figures: dict[str, Any]) -> Table:
    table = Table(title=f"{figures['trace']}: {figures['runs']} runs, {figures['folds']} folds by task instance")
    table.add_column("model")
    for heading in (
        "top-1 at 1",
        "2",
        "3",
        "5",
        "10",
        "NLL at 1",
        "2",
        "3",
        "ECE at 1",
        "scaled, debiased",
        "END recall",
    ):
        table.add_column(heading, justify="right")
    for name, row in figures["models"].items():
        numbers = [*(row["top1"][k] for k in (0, 1, 2, 4, 9)), *row["nll_scaled"][:3], row["ece"][0]]
        numbers += [row["ece_scaled_debiased"][0], row["end_recall"]]
        table.add_row(name, *("-" if number is None else f"{number:.3f}" for number in numbers))
    return table

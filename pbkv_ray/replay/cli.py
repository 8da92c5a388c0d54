"""`pbkv replay`, `pbkv traces`, `pbkv report`: mounted by pbkv_ray.cli."""

import json
from pathlib import Path
from typing import Annotated, cast, get_args

import typer
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from pbkv_ray.errors import ConfigError
from pbkv_ray.replay.arrivals import ToolWaits
from pbkv_ray.replay.workload import BLOCK_TOKENS, Half, Workload

console = Console(stderr=True)
replay_app = typer.Typer(help="Replay a trace: policies on simulated engines, down to Belady.", no_args_is_help=True)
traces_app = typer.Typer(help="Read, convert and describe traces.", no_args_is_help=True)

TraceOption = Annotated[Path, typer.Option("--trace", help="a *.wf.jsonl.gz, Mooncake or pbkv-runs file")]
JsonOption = Annotated[Path | None, typer.Option("--json", help="write the result there")]
HalfOption = Annotated[str, typer.Option(help="tune, report or all; split by task instance")]


def _fractions(text: str) -> list[float]:
    try:
        values = [float(part) for part in text.split(",") if part.strip()]
    except ValueError:
        values = []
    if not values or min(values) <= 0:
        raise ConfigError(f"pool fractions {text!r} must be numbers above zero, for instance 0.2,0.3")
    return values


def _halves(
    trace: Path, half: str, runs: int | None, whole: bool, train: str, max_prompt: int | None = None
) -> tuple[Workload, Workload | None]:
    from pbkv_ray.replay.traces import read_trace

    if half not in get_args(Half) or train not in ("tune", "none"):
        raise ConfigError(f"--half is {half!r}, --train is {train!r}; use tune, report, all, and tune, none")
    workload = read_trace(trace, standard=not whole).max_prompt(max_prompt)
    shown = workload.half(cast(Half, half)).cut(runs)
    other: Half = "report" if half == "tune" else "tune"
    return shown, None if train == "none" or half == "all" else workload.half(other).cut(runs)


def _waits(text: str) -> ToolWaits:
    try:
        low, high = (float(part) for part in text.split(":"))
    except ValueError:
        low = high = -1.0
    if not 0 <= low <= high:
        raise ConfigError(f"--waits {text!r} must be two seconds, the smaller first, for instance 1:8")
    return ToolWaits(low, high)


@replay_app.callback(invoke_without_command=True)
def replay_command(
    context: typer.Context,
    trace: TraceOption = Path(),
    policies: Annotated[
        str, typer.Option(help="names, each also as NAME@best, NAME@auto or NAME@N")
    ] = "lru,session,pbkv,pbkv+,belady",
    pool_fraction: Annotated[str, typer.Option(help="of the live footprint, comma separated")] = "0.2",
    concurrency: Annotated[int | None, typer.Option(help="runs in flight; default: the trace's own")] = None,
    runs: Annotated[int | None, typer.Option(help="cut to so many runs")] = None,
    half: HalfOption = "report",
    train: Annotated[str, typer.Option(help="tune: predictors saw the other half before; none: cold start")] = "tune",
    mode: Annotated[str, typer.Option(help="fixed (hit rates), loop (latency) or both")] = "both",
    cost: Annotated[str, typer.Option(help="MODEL/GPU, MODEL/GPU/tpN, or a calibration file")] = "qwen3-14b/a6000",
    host_ratio: Annotated[float, typer.Option(help="host pool / device pool; 0 = no host tier")] = 0.0,
    write_policy: Annotated[str, typer.Option(help="HiCache's")] = "write_through",
    arrivals: Annotated[str, typer.Option(help="closed, backlog, poisson:RATE or trace:SPEED")] = "closed",
    waits: Annotated[str, typer.Option(help="LOW:HIGH seconds of a tool, where the trace does not say")] = "1:8",
    max_running: Annotated[int, typer.Option(min=1, help="batch of the engine")] = 64,
    order: Annotated[str, typer.Option(help="of waiting calls: fcfs or cached")] = "fcfs",
    outputs: Annotated[str, typer.Option(help="in the tree: none, private or continued")] = "private",
    max_output: Annotated[int | None, typer.Option(help="cut outputs to so many tokens")] = None,
    max_prompt: Annotated[int | None, typer.Option(help="leave runs with a longer prompt out")] = None,
    page: Annotated[int, typer.Option(help="16: one unit a block; 1: every token")] = BLOCK_TOKENS,
    noise: Annotated[float, typer.Option(help="share of uniform noise in forecasts (paper Eq. 5)")] = 0.0,
    predictor: Annotated[
        str,
        typer.Option(help="counts, order-1, order-2, order-3, graphsage (trained first), served (both) or misled"),
    ] = "counts",
    shadow: Annotated[str, typer.Option(help="off, watch (estimate LRU) or guard (fall back to it)")] = "off",
    steps: Annotated[int, typer.Option(help="K of the paper's score")] = 3,
    gamma: Annotated[float, typer.Option(help="of the paper's score")] = 0.7,
    rho: Annotated[float, typer.Option(help="share of the pool that prefetch may take from active nodes")] = 0.0,
    known_only: Annotated[bool, typer.Option(help="leave out prompt tokens without block ids")] = False,
    whole: Annotated[bool, typer.Option(help="the whole file, not its standard part")] = False,
    seed: Annotated[int, typer.Option()] = 0,
    json_path: JsonOption = None,
) -> None:
    """Simulated seconds; hits are tokens over prompt tokens."""
    if context.invoked_subcommand is not None:
        return
    from pbkv_ray.replay.arrivals import parse_arrivals
    from pbkv_ray.replay.cost import load_cost
    from pbkv_ray.replay.experiment import Mode, Setup, replay
    from pbkv_ray.replay.keys import Outputs
    from pbkv_ray.replay.outcome import Scheduler
    from pbkv_ray.replay.policies import parse_policies
    from pbkv_ray.replay.predictors import predictor_of

    choices = parse_policies(policies)
    if mode not in get_args(Mode) or outputs not in get_args(Outputs) or order not in ("fcfs", "cached"):
        raise ConfigError(f"--mode {mode!r}, --outputs {outputs!r} or --order {order!r} is unknown; see --help")
    shown, other = _halves(trace, half, runs, whole, train, max_prompt)
    cutting = [w.max_output(max_output) for w in (shown, other) if w is not None]
    train_on = cutting[1] if len(cutting) > 1 else None
    setup = Setup(
        cutting[0],
        concurrency or shown.in_flight,
        train_on,
        unit_tokens=page,
        outputs=cast(Outputs, outputs),
        known_only=known_only,
        host_ratio=host_ratio,
        write_policy=write_policy,
        cost=load_cost(cost),
        scheduler=Scheduler(max_running=max_running, order="cached" if order == "cached" else "fcfs"),
        arrivals=parse_arrivals(arrivals),
        waits=_waits(waits),
        seed=seed,
        noise=noise,
        predictor=predictor,
        shadow=shadow,
        make_predictor=predictor_of(predictor, train_on),
        steps=steps,
        gamma=gamma,
        rho=rho,
    )
    fractions = _fractions(pool_fraction)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(f"replaying {shown.name}", total=None)
        result = replay(
            choices, fractions, setup, cast(Mode, mode), lambda text: progress.update(task, description=text)
        )
    if json_path is not None:
        json_path.write_text(json.dumps(result, indent=1) + "\n")
    _print(result)


def _print(result: dict[str, object]) -> None:
    from pbkv_ray.replay.report import rows

    table = Table(title="replay (simulated seconds)")
    header, body = rows(result)
    for name in header:
        table.add_column(name, justify="left" if name in ("pool", "policy") else "right")
    for row in body:
        table.add_row(*row)
    Console().print(table)


@replay_app.command("generate")
def generate_command(
    workflow: Annotated[str, typer.Argument(help="hover, swe or finance")],
    out: Annotated[Path, typer.Argument(help="a .jsonl or .jsonl.gz file")],
    runs: Annotated[int, typer.Option()] = 300,
    seed: Annotated[int, typer.Option()] = 0,
    loops: Annotated[float | None, typer.Option(help="probability of another round")] = None,
    growth: Annotated[int | None, typer.Option(help="tokens a step adds to the context")] = None,
    system: Annotated[int | None, typer.Option(help="tokens of an agent's system prompt")] = None,
) -> None:
    """Make a trace of one of the paper's three workflow shapes."""
    from pbkv_ray.replay.generate import Knobs, generate
    from pbkv_ray.replay.traces import write_trace

    knobs = Knobs.of(workflow, loops=loops, growth_tokens=growth, system_tokens=system)
    write_trace(out, generate(workflow, runs, knobs, seed))
    console.print(f"{runs} runs of {workflow} in {out}")


@replay_app.command("calibrate")
def calibrate_command(
    out: Annotated[Path, typer.Argument(help="JSON file for --cost")],
    model: Annotated[str, typer.Option(help="default, a model folder or a hub id")] = "default",
    pool: Annotated[int, typer.Option(help="device pool, tokens")] = 65_536,
    repeats: Annotated[int, typer.Option(help="of every measurement; the least counts")] = 3,
) -> None:
    """Fit the cost model to a real engine on this (idle) machine."""
    import os

    from pbkv_ray.config import EngineOptions
    from pbkv_ray.engine.cpu_platform import has_accelerator, select_platform
    from pbkv_ray.engine.models import resolve_model
    from pbkv_ray.replay.calibrate import calibrate
    from pbkv_ray.replay.cost import save_cost

    accelerator = has_accelerator()
    select_platform(os.environ, accelerator)
    options = EngineOptions(model, device_pool_tokens=pool)
    cost, measured = calibrate(options, resolve_model(model), accelerator, repeats, console.print)
    save_cost(out, cost, measured)
    console.print(f"{cost}")


@traces_app.command("import")
def import_command(
    source: Annotated[Path, typer.Argument(help="any trace that pbkv reads")],
    out: Annotated[Path, typer.Argument(help="a .jsonl or .jsonl.gz file in our own format")],
    whole: Annotated[bool, typer.Option(help="the whole file, not its standard part")] = False,
) -> None:
    """Convert a trace into our own format."""
    from pbkv_ray.replay.traces import read_trace, write_trace

    workload = read_trace(source, standard=not whole)
    write_trace(out, workload)
    console.print(f"{len(workload)} runs of {workload.name} in {out}")


@traces_app.command("export")
def export_command(
    database: Annotated[str, typer.Argument(help="SQLAlchemy URL of the store of an application that records")],
    out: Annotated[Path, typer.Argument(help="a .wf.jsonl or .wf.jsonl.gz file in our own format")],
    workflow: Annotated[str | None, typer.Option(help="only its runs")] = None,
    states: Annotated[bool, typer.Option(help="write hidden states too, to NAME.states.npz beside it")] = True,
) -> None:
    """Write recorded runs as a trace, for `pbkv train`, `pbkv evaluate` and `pbkv replay`."""
    from pbkv_ray.replay.recorded import export

    runs, with_states = export(database, out, workflow=workflow, states=states)
    console.print(f"{runs} runs in {out}, hidden states of {with_states} calls")


@traces_app.command("stats")
def stats_command(
    trace: Annotated[Path, typer.Argument()],
    half: HalfOption = "all",
    runs: Annotated[int | None, typer.Option()] = None,
    whole: Annotated[bool, typer.Option(help="the whole file, not its standard part")] = False,
    json_path: JsonOption = None,
) -> None:
    """Agents, transition entropy, revisit gaps, prefix sharing, live footprint."""
    from pbkv_ray.replay.stats import statistics

    shown, _ = _halves(trace, half, runs, whole, "none")
    result = statistics(shown)
    if json_path is not None:
        json_path.write_text(json.dumps(result, indent=1) + "\n")
    table = Table(title=shown.name)
    table.add_column("figure")
    table.add_column("value")
    for name, value in result.items():
        table.add_row(name, json.dumps(value))
    Console().print(table)


def report_command(
    sources: Annotated[list[Path] | None, typer.Argument(help="JSON files of `pbkv replay --json`")] = None,
    trace: Annotated[Path | None, typer.Option(help="run the whole study of this trace first")] = None,
    runs: Annotated[int | None, typer.Option(help="cut the trace of the study to so many runs")] = None,
    parts: Annotated[str, typer.Option(help="of the study, comma separated; default: all")] = "",
    cost: Annotated[str, typer.Option(help="MODEL/GPU, MODEL/GPU/tpN, or a calibration file")] = "qwen3-14b/a6000",
    out: Annotated[Path, typer.Option(help="folder for report.md, report.json and the plots")] = Path("report"),
) -> None:
    """Tables (markdown, JSON) and plots (PNG, SVG) of replays. With --trace it makes the replays, too: policies by
    pool and by concurrency, K, gamma, noise, rho, the paper's ablation. Replays already in the folder are kept."""
    from pbkv_ray.replay.report import write_report

    files = list(sources or [])
    if trace is not None:
        from pbkv_ray.replay.cost import load_cost
        from pbkv_ray.replay.study import study

        shown, other = _halves(trace, "report", runs, False, "tune")
        files += study(shown, other, load_cost(cost), out, parts, console.print)
    for path in write_report(files, out):
        console.print(str(path))

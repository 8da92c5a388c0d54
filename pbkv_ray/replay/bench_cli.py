"""`pbkv bench`: mounted by pbkv_ray.cli."""

import asyncio
import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from pbkv_ray.config import POLICIES
from pbkv_ray.errors import ConfigError

console = Console(stderr=True)
bench_app = typer.Typer(help="Measure our plug-in on SGLang itself.", no_args_is_help=True)
JsonOption = Annotated[Path | None, typer.Option("--json", help="write the result there")]


@bench_app.command("evict")
def evict_command(
    leaves: Annotated[int, typer.Option(min=1)] = 50_000,
    sets: Annotated[int, typer.Option(min=1, help="distinct owner sets")] = 500,
    evictions: Annotated[int, typer.Option(min=1)] = 1_000,
    json_path: JsonOption = None,
) -> None:
    """What one eviction costs: ours, SGLang's Python core and its Rust core, on the real cache object."""
    from pbkv_ray.replay.bench_evict import bench_evict

    result = bench_evict(leaves, sets, evictions)
    table = Table("", "p50 ms", "p99 ms", "mean ms")
    for name, row in result.items():
        if name != "setup":
            table.add_row(name, *(f"{row[key]:.4f}" for key in ("p50_ms", "p99_ms", "mean_ms")))
    console.print(table)
    _write(json_path, result)


@bench_app.command("policies")
def policies_command(
    trace: Annotated[Path, typer.Option(help="a *.wf.jsonl.gz, Mooncake or pbkv-runs file")],
    policies: Annotated[
        str, typer.Option(help="comma separated; NAME@auto: admission holds new runs back")
    ] = "lru,session,pbkv,pbkv+",
    pool_fraction: Annotated[float, typer.Option(help="device pool as a share of the live footprint")] = 0.3,
    concurrency: Annotated[int, typer.Option(min=1, help="runs in flight")] = 16,
    runs: Annotated[int, typer.Option(min=1)] = 40,
    max_output: Annotated[int, typer.Option(min=1, help="outputs are cut to so many tokens")] = 16,
    max_prompt: Annotated[int, typer.Option(help="leave runs with a longer prompt out")] = 8_000,
    blocks: Annotated[int, typer.Option(min=1, help="policies take turns so often")] = 2,
    host_ratio: Annotated[float, typer.Option(help="host pool / device pool; 0 = no host tier")] = 2.0,
    write_policy: Annotated[str, typer.Option(help="HiCache's")] = "write_through",
    max_running: Annotated[int, typer.Option(min=1, help="batch of the engine")] = 8,
    train: Annotated[bool, typer.Option(help="predictors saw the other half of the trace before")] = True,
    noise: Annotated[float, typer.Option(min=0.0, max=1.0, help="share of uniform noise in forecasts")] = 0.0,
    misled: Annotated[bool, typer.Option("--misled", help="all forecasts are sure and wrong")] = False,
    size: Annotated[str, typer.Option(help="random-weight model: nano, tiny or 25m")] = "25m",
    seed: Annotated[int, typer.Option()] = 0,
    json_path: JsonOption = None,
) -> None:
    """Replay a trace on the real engine under several policies; hits are tokens over prompt tokens."""
    from pbkv_ray.config import EngineOptions
    from pbkv_ray.engine.models import cache_dir, tiny_model
    from pbkv_ray.replay.bench_policies import BenchOptions, bench_policies, named
    from pbkv_ray.replay.traces import read_trace

    names = tuple(name.strip() for name in policies.split(",") if name.strip())
    if not names or {named(name) for name in names} - set(POLICIES):
        raise ConfigError(f"--policies {policies!r}: known are {', '.join(POLICIES)}")
    workload = read_trace(trace)
    shown = workload.half("report").max_prompt(max_prompt).cut(runs, seed).max_output(max_output)
    seen = workload.half("tune").cut(200, seed) if train else None
    engine = EngineOptions(
        model=str(tiny_model(cache_dir() / "models" / f"bench-{size}", size=size)),
        host_pool_ratio=host_ratio,
        write_policy=write_policy,
        max_running_requests=max_running,
        dtype="float32",
    )
    options = BenchOptions(engine, names, pool_fraction, concurrency, blocks, noise=noise, misled=misled, seed=seed)
    result = asyncio.run(bench_policies(shown, seen, options, lambda line: console.print(line, highlight=False)))
    table = Table("policy", "device", "host", "run s", "done s", "ttft s", "recomputed", "prefill share", "evict ms")
    for name, row in result["policies"].items():
        table.add_row(
            name,
            f"{row['device_hit']:.3f}",
            f"{row['host_hit']:.3f}",
            f"{row['run_seconds']['mean']:.1f}",
            f"{row['completion_seconds']['mean']:.1f}",
            f"{row['ttft_seconds']['mean']:.2f}",
            str(row["recomputed_tokens"]),
            str(row["prefill_share"]),
            str(row["evict_ms_mean"]),
        )
    console.print(table)
    _write(json_path, result)


def _write(path: Path | None, result: dict[str, Any]) -> None:
    text = json.dumps(result, indent=1)
    if path is None:
        print(text)
    else:
        path.write_text(text + "\n")

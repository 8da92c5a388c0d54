"""`pbkv bench routing`."""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

console = Console(stderr=True)


def routing(
    trace: Annotated[Path, typer.Option(help="a *.wf.jsonl.gz, Mooncake or pbkv-runs file")],
    replicas: Annotated[int, typer.Option(min=1, help="engines")] = 3,
    routers: Annotated[str, typer.Option(help="comma separated")] = "pow2,pbkv,hash,prefix",
    policy: Annotated[str, typer.Option(help="of the engines")] = "pbkv+",
    pool_fraction: Annotated[float, typer.Option(help="all pools, as a share of the live footprint")] = 0.5,
    concurrency: Annotated[int, typer.Option(min=1, help="runs in flight, over all engines")] = 12,
    runs: Annotated[int, typer.Option(min=1)] = 36,
    max_output: Annotated[int, typer.Option(min=1, help="outputs are cut to so many tokens")] = 4,
    max_prompt: Annotated[int, typer.Option(help="leave runs with a longer prompt out")] = 6_000,
    host_ratio: Annotated[float, typer.Option(help="host pool / device pool; 0 = no host tier")] = 0.0,
    size: Annotated[str, typer.Option(help="random-weight model: nano, tiny or 25m")] = "tiny",
    seed: Annotated[int, typer.Option()] = 0,
    json_path: Annotated[Path | None, typer.Option("--json", help="write the result there")] = None,
) -> None:
    """A trace on real engines behind Ray Serve, under one router after the other."""
    from pbkv_ray.cli.local import prepare_environment

    prepare_environment()
    from deployments.bench_routing import RoutingBench, bench_routing
    from pbkv_ray.config import EngineOptions
    from pbkv_ray.engine.models import cache_dir, tiny_model
    from pbkv_ray.replay.traces import read_trace

    shown = read_trace(trace).half("report").max_prompt(max_prompt).cut(runs, seed).max_output(max_output)
    engine = EngineOptions(
        model=str(tiny_model(cache_dir() / "models" / f"bench-{size}", size=size)),
        policy=policy,
        host_pool_ratio=host_ratio,
        max_running_requests=8,
        dtype="float32",
    )
    names = tuple(name.strip() for name in routers.split(",") if name.strip())
    bench = RoutingBench(engine, names, replicas, pool_fraction, concurrency, seed=seed)
    result = bench_routing(shown, bench, lambda line: console.print(line, highlight=False))
    table = Table("router", "device hit", "host", "imbalance", "replicas a run", "choosing p50 ms", "p99 ms", "run s")
    for name, row in result["routers"].items():
        chosen = row["choosing_ms"]
        table.add_row(
            name,
            f"{row['device_hit']:.3f}",
            f"{row['host_hit']:.3f}",
            f"{row['imbalance']:.2f}",
            f"{row['replicas_per_run']:.2f}",
            f"{chosen['p50']:.2f}",
            f"{chosen['p99']:.2f}",
            f"{row['run_seconds']['mean']:.1f}",
        )
    Console().print(table)
    if json_path is not None:
        json_path.write_text(json.dumps(result, indent=1) + "\n")

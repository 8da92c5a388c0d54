"""`pbkv replay routing`: routers against each other on simulated replicas, in simulated seconds."""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from pbkv_ray.errors import ConfigError
from pbkv_ray.replay.arrivals import Arrivals, ToolWaits
from pbkv_ray.replay.cost import Cost
from pbkv_ray.replay.keys import Keys
from pbkv_ray.replay.outcome import Scheduler
from pbkv_ray.replay.workload import BLOCK_TOKENS, Workload

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class RoutingSetup:
    """concurrency and pool_fraction are of one replica: the cluster has as many times as much."""

    workload: Workload
    concurrency: int
    pool_fraction: float
    policy: str
    cost: Cost
    host_ratio: float = 0.0
    max_running: int = 64
    arrivals: Arrivals = field(default_factory=Arrivals)
    waits: ToolWaits = field(default_factory=ToolWaits)
    seed: int = 0


def simulate(router: str, replicas: int, setup: RoutingSetup) -> Json:
    from pbkv_ray.replay.cluster import Cluster, make_drivers
    from pbkv_ray.replay.routers import ROUTERS
    from pbkv_ray.replay.tree import TreeOptions

    workload = setup.workload
    capacity = workload.pool_tokens(setup.pool_fraction, setup.concurrency) // BLOCK_TOKENS
    longest = max(call.prompt_tokens + call.output_tokens for _, call in workload.calls())
    if capacity * BLOCK_TOKENS < longest:
        raise ConfigError(
            f"a replica's pool of {capacity * BLOCK_TOKENS} tokens does not hold the longest call ({longest}); raise "
            "the pool fraction or the concurrency, or leave long prompts out"
        )
    base = TreeOptions(
        capacity,
        host_units=int(capacity * setup.host_ratio),
        max_requests=setup.max_running + 8,
        max_context_units=longest // BLOCK_TOKENS + 16,
    )
    cluster = Cluster(
        workload,
        Keys(workload),
        make_drivers(setup.policy, replicas, base, BLOCK_TOKENS),
        ROUTERS[router](replicas, setup.seed),
        setup.cost,
        capacity,
        Scheduler(concurrency=setup.concurrency * replicas, max_running=setup.max_running),
        setup.waits,
        setup.arrivals,
        setup.seed,
    )
    began_s = time.perf_counter()
    return cluster.run().as_json() | {"cpu_seconds": round(time.perf_counter() - began_s, 1)}


def compare(
    routers: Sequence[str], replicas: Sequence[int], setup: RoutingSetup, progress: Callable[[str], None]
) -> Json:
    """{"replicas": {N: {"routers": {NAME: figures}}}, "setup": ...}"""
    result: Json = {}
    for count in replicas:
        rows: Json = {}
        for router in routers:
            progress(f"{count} replicas: {router}")
            rows[router] = simulate(router, count, setup)
        result[str(count)] = {"routers": rows}
    workload = setup.workload
    about = {
        "trace": workload.name,
        "runs": len(workload),
        "calls": sum(len(run.calls) for run in workload.runs),
        "concurrency_per_replica": setup.concurrency,
        "pool_fraction": setup.pool_fraction,
        "policy": setup.policy,
        "host_ratio": setup.host_ratio,
        "cost": setup.cost.name,
        "arrivals": setup.arrivals.kind,
        "seed": setup.seed,
    }
    return {"replicas": result, "setup": about}


def routing_command(
    trace: Annotated[Path, typer.Option(help="a *.wf.jsonl.gz, Mooncake or pbkv-runs file")],
    replicas: Annotated[str, typer.Option(help="how many, comma separated")] = "3,8,32",
    routers: Annotated[str, typer.Option(help="comma separated")] = "pbkv,pow2,hash,prefix,prefix-balanced",
    policy: Annotated[str, typer.Option(help="of every replica's cache")] = "pbkv+",
    pool_fraction: Annotated[float, typer.Option(help="of the live footprint of a replica's share of runs")] = 0.5,
    concurrency: Annotated[int, typer.Option(min=1, help="runs in flight, a replica")] = 8,
    runs: Annotated[int | None, typer.Option(help="cut to so many runs")] = None,
    max_output: Annotated[int | None, typer.Option(help="cut outputs to so many tokens")] = None,
    max_prompt: Annotated[int | None, typer.Option(help="leave runs with a longer prompt out")] = None,
    cost: Annotated[str, typer.Option(help="MODEL/GPU, MODEL/GPU/tpN, or a calibration file")] = "qwen3-14b/a6000",
    host_ratio: Annotated[float, typer.Option(help="host pool / device pool; 0 = no host tier")] = 0.0,
    arrivals: Annotated[str, typer.Option(help="closed, poisson:RATE (of the cluster) or trace:SPEED")] = "closed",
    seed: Annotated[int, typer.Option()] = 0,
    json_path: Annotated[Path | None, typer.Option("--json", help="write the result there")] = None,
) -> None:
    """Routers against each other on simulated replicas; hits are tokens over prompt tokens, times simulated."""
    from pbkv_ray.replay.arrivals import parse_arrivals
    from pbkv_ray.replay.cost import load_cost
    from pbkv_ray.replay.routers import parse_routers
    from pbkv_ray.replay.traces import read_trace

    names = parse_routers(routers)
    counts = [int(part) for part in replicas.split(",") if part.strip().isdigit() and int(part) > 0]
    if not counts:
        raise ConfigError(f"--replicas {replicas!r} must be numbers above zero, for instance 3,8,32")
    shown = read_trace(trace).cut(runs, seed).max_prompt(max_prompt).max_output(max_output)
    setup = RoutingSetup(
        shown,
        concurrency,
        pool_fraction,
        policy,
        load_cost(cost),
        host_ratio=host_ratio,
        arrivals=parse_arrivals(arrivals),
        seed=seed,
    )
    console = Console(stderr=True)
    result = compare(names, counts, setup, lambda text: console.print(text, highlight=False))
    table = Table("replicas", "router", "device hit", "run s", "p99", "ttft p99", "imbalance", "replicas a run")
    for count, entry in result["replicas"].items():
        for name, row in entry["routers"].items():
            lived = row["run_seconds"]
            table.add_row(
                count,
                name,
                f"{row['device_hit']:.3f}",
                f"{lived['mean']:.1f}",
                f"{lived['p99']:.1f}",
                f"{row['ttft_seconds']['p99']:.2f}",
                f"{row['imbalance']:.2f}",
                f"{row['replicas_per_run']:.2f}",
            )
    Console().print(table)
    if json_path is not None:
        json_path.write_text(json.dumps(result, indent=1) + "\n")

"""What a forecast costs on one core: `python -m pbkv_ray.predict.bench --json`.

64 runs of a made-up workflow of six agents that loops, forecast at once and one by one, with counts alone and with a
net (random weights, the size that `pbkv train` makes) behind an open gate. CPU time of this process, so that other
load on the machine does not show; wall time beside it.
"""

import json
import os
from collections.abc import Callable
from itertools import pairwise
from time import perf_counter, process_time
from typing import Annotated, Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np
import typer

from pbkv_ray.predict.features import width
from pbkv_ray.predict.inference import ServedNet
from pbkv_ray.predict.serving import Served, ServingOptions

AGENTS = ("planner", "navigator", "editor", "executor", "reviewer", "summary")
HORIZON = 10


def made_up_runs(count: int, generator: np.random.Generator) -> list[tuple[str, ...]]:
    """Paths of 5 to 60 calls: an agent stays for some calls, then another one follows."""
    runs = []
    for _ in range(count):
        path: list[str] = ["planner"]
        while len(path) < generator.integers(5, 60):
            path += [AGENTS[generator.integers(6)]] * int(generator.integers(1, 6))
        runs.append(tuple(path))
    return runs


def random_net(generator: np.random.Generator, hidden: int = 128, size: int = 32) -> ServedNet:
    agents, classes = len(AGENTS), len(AGENTS) + 1

    def some(*shape: int) -> np.ndarray[Any, np.dtype[np.float32]]:
        return (generator.standard_normal(shape) * 0.1).astype(np.float32)

    tensors = {
        "embedding.weight": some(agents + 1, size),
        "query.weight": some(size, size),
        "features.0.weight": some(hidden, width(agents)),
        "features.0.bias": some(hidden),
        "head.1.weight": some(hidden, 2 * size + hidden),
        "head.1.bias": some(hidden),
        "free.weight": some(HORIZON * classes, hidden),
        "free.bias": some(HORIZON * classes),
        "tied.weight": some(HORIZON * size, hidden),
        "tied.bias": some(HORIZON * size),
    }
    for layer in ("layers.0", "layers.1"):
        tensors |= {f"{layer}.lin_rel.weight": some(size, size), f"{layer}.lin_rel.bias": some(size)}
        tensors[f"{layer}.lin_root.weight"] = some(size, size)
    ones, transitions = np.ones(HORIZON), np.abs(some(agents + 1, agents + 1))
    return ServedNet(AGENTS, HORIZON, (), ones, ones * 0.5, transitions, tensors, {"net": {"graph": True}})


def measure(call: Callable[[int], object], repeats: int) -> dict[str, float]:
    """p50 and p99 in milliseconds."""
    cpu, wall = [], []
    for i in range(repeats):
        started, began = perf_counter(), process_time()
        call(i)
        cpu.append(process_time() - began)
        wall.append(perf_counter() - started)
    return {
        name: round(float(np.percentile(np.array(times) * 1e3, share)), 4)
        for name, times, share in (
            ("cpu_p50_ms", cpu, 50),
            ("cpu_p99_ms", cpu, 99),
            ("wall_p50_ms", wall, 50),
            ("wall_p99_ms", wall, 99),
        )
    }


def bench(
    repeats: Annotated[int, typer.Option(min=10)] = 200,
    batch: Annotated[int, typer.Option(min=1)] = 64,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of lines.")] = False,
) -> None:
    """Measure the cost of forecasts."""
    generator = np.random.default_rng(0)
    learned, running = made_up_runs(60, generator), made_up_runs(batch, generator)
    results: dict[str, Any] = {"batch": batch, "repeats": repeats, "horizon": HORIZON}
    for name in ("counts", "counts and net"):
        served = Served(options=ServingOptions(slow_s=1e9))
        for path in learned:
            tokens = generator.integers(1, 1_000, len(path)).tolist()
            for i in range(len(path) + 1):
                following = path[i] if i < len(path) else None
                served.observe("bench", path[:i], following, answers=tokens[:i])
            for agent, following in pairwise(path):
                served.observe_wait("bench", agent, following, float(generator.lognormal()))
        if name != "counts":
            served.install("bench", random_net(generator))
            served.gates()["bench"].open = True
        # Each run has made one more call at each turn, as in service.
        asked = [[path[: 1 + (i + n) % len(path)] for n, path in enumerate(running)] for i in range(repeats)]
        results |= _measured(served, name, asked)
    if as_json:
        print(json.dumps(results, indent=1))
        return
    for name, figures in results.items():
        print(name, figures)


def _measured(served: Served, name: str, asked: list[list[tuple[str, ...]]]) -> dict[str, Any]:
    def together(i: int) -> object:
        return served.forecasts("bench", asked[i], HORIZON)

    def one(i: int) -> object:
        return served.forecast("bench", asked[i][0], HORIZON)

    def observe(i: int) -> None:
        served.observe("bench", asked[i][0][:-1], asked[i][0][-1])

    def answered(i: int) -> object:
        return [served.refined("bench", run[-1], 7 * n, made[n]) for n, run in enumerate(asked[i])]

    made = [forecast for forecast in served.forecasts("bench", asked[0], HORIZON) if forecast is not None]
    return {
        f"{name}, {len(asked[0])} runs at once": measure(together, len(asked)),
        f"{name}, one run": measure(one, len(asked)),
        f"{name}, observe": measure(observe, len(asked)),
        f"{name}, {len(asked[0])} answers": measure(answered, len(asked)),
    }


if __name__ == "__main__":
    typer.run(bench)

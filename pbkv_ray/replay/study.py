"""The replays behind a report of one trace: one JSON file each, made unless it is there already."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from pbkv_ray.errors import ConfigError
from pbkv_ray.replay.cost import Cost
from pbkv_ray.replay.experiment import Mode, Setup, replay
from pbkv_ray.replay.policies import parse_policies
from pbkv_ray.replay.workload import Workload

_ALL = "lru,lfu,slru,tlru,gdsf,session,kvflow,lae,he,pbkv+,oracle,belady"
_FEW = "lru,session,he,pbkv+"
PARTS = ("pools", "concurrency", "K", "gamma", "noise", "rho", "ablation")


@dataclass(frozen=True, slots=True)
class _Replay:
    name: str
    policies: str
    setup: Setup
    mode: Mode
    fractions: tuple[float, ...] = (0.2,)


def study(
    workload: Workload,
    train: Workload | None,
    cost: Cost,
    out: Path,
    parts: str = "",
    say: Callable[[str], None] = lambda text: None,
) -> list[Path]:
    """Returns the JSON files. `parts`: a comma separated choice of PARTS. Raises ConfigError for an unknown one."""
    chosen = tuple(filter(None, (part.strip() for part in parts.split(",")))) or PARTS
    if unknown := set(chosen) - set(PARTS):
        raise ConfigError(f"a study has no part {sorted(unknown)[0]!r}; its parts are {', '.join(PARTS)}")
    out.mkdir(parents=True, exist_ok=True)
    files = []
    for part in chosen:
        for item in _replays(part, workload, train, cost):
            path = out / f"{workload.name}_{item.name}.json"
            if not path.is_file():
                say(f"{path.name} ...")
                result = replay(parse_policies(item.policies), item.fractions, item.setup, item.mode)
                path.write_text(json.dumps(result, indent=1) + "\n")
            files.append(path)
    return files


def _replays(part: str, workload: Workload, train: Workload | None, cost: Cost) -> Iterator[_Replay]:
    base = Setup(workload, workload.in_flight, train, outputs="none", known_only=True, cost=cost)
    timed = replace(base, outputs="private", known_only=False)
    tiers = replace(timed, host_ratio=2.0)
    n = workload.in_flight
    match part:
        case "pools":
            yield _Replay("pools", _ALL, base, "fixed", (0.1, 0.2, 0.3, 0.5))
        case "concurrency":
            # The pool stays the one that holds 30 % of the live footprint of the trace's own concurrency.
            for runs in sorted({max(2, n // 4), n // 2, 3 * n // 4, n, 3 * n // 2, 2 * n}):
                fraction = 0.3 * n / runs
                yield _Replay(f"concurrency_{runs}", _FEW, replace(timed, concurrency=runs), "loop", (fraction,))
            yield _Replay("limits", "lru,lru@best,pbkv+,pbkv+@best,pbkv+@auto", timed, "loop", (0.2,))
        case "K":
            for steps in (1, 2, 3, 4, 5, 8):
                yield _Replay(f"K_{steps}", "he", replace(base, steps=steps), "fixed")
        case "gamma":
            for gamma in (0.5, 0.6, 0.7, 0.8, 0.9):
                yield _Replay(f"gamma_{gamma:g}", "he", replace(base, gamma=gamma), "fixed")
        case "noise":
            for noise in (0.0, 0.1, 0.2, 0.3, 0.4, 0.7, 1.0):
                yield _Replay(f"noise_{noise:g}", "lae,he,pbkv+", replace(base, noise=noise), "fixed")
        case "rho":
            for rho in (0.0, 0.1, 0.2, 0.3, 0.4):
                yield _Replay(f"rho_{rho:g}", "pbkv", replace(tiers, rho=rho), "loop", (0.3,))
        case "ablation":
            yield _Replay("ablation", "lru,lae,he,pbkv,pbkv+", tiers, "loop", (0.3,))

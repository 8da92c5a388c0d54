"""Tables and plots of replays: `pbkv report FILES` writes report.md, report.json and one plot per figure."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from pbkv_ray.errors import InputError

Json = dict[str, Any]
Row = list[str]

_COLUMNS = (
    ("device hit", "device_hit"),
    ("host hit", "host_hit"),
    ("recomputed", "recomputed_tokens"),
    ("limit", "limit"),
    ("run s", "run_seconds.mean"),
    ("run p99 s", "run_seconds.p99"),
    ("completion s", "completion_seconds.mean"),
    ("TTFT s", "ttft_seconds.mean"),
    ("makespan s", "wall_seconds"),
    ("hit at fixed order", "fixed_order.device_hit"),
    ("share of Belady", "share"),
    ("LRU by its shadow", "shadow_hit"),
    ("fell back", "shadow.fallbacks"),
)


def rows(result: Json) -> tuple[Row, list[Row]]:
    """Header and rows of one replay's JSON; columns that no policy fills are left out."""
    entries = [
        (pool, name, _shared(entry))
        for pool, of_pool in result["pools"].items()
        for name, entry in of_pool["policies"].items()
    ]
    shown = [(title, key) for title, key in _COLUMNS if any(_at(entry, key) is not None for _, _, entry in entries)]
    body = [[pool, name, *(_text(_at(entry, key)) for _, key in shown)] for pool, name, entry in entries]
    return ["pool", "policy", *(title for title, _ in shown)], body


def _shared(entry: Json) -> Json:
    known = entry.get("fixed_order", {}) | entry
    shadow = known.get("shadow")
    return (
        entry
        | {"share": known.get("share_of_belady")}
        | ({"shadow_hit": shadow["lru"] / max(1, shadow["prompt"])} if shadow else {})
    )


def _at(entry: Json, key: str) -> Any:
    value: Any = entry
    for part in key.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def _text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.3f}" if abs(value) < 10 else f"{value:,.1f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def markdown(header: Row, body: Iterable[Row]) -> str:
    lines = [header, ["---"] * len(header), *body]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def write_report(sources: Sequence[Path], out: Path) -> list[Path]:
    """Returns the files written. Raises InputError for a source that is no replay result."""
    if not sources:
        raise InputError("there is nothing to report; name files of `pbkv replay --json`, or a --trace")
    results = [_load(path) for path in sources]
    out.mkdir(parents=True, exist_ok=True)
    text = ["# Replays\n"]
    for path, result in zip(sources, results, strict=True):
        setup = result["setup"]
        text.append(
            f"## {path.stem}: {setup['trace']}, {setup['runs']} runs, {setup['concurrency']} in flight\n\n"
            f"{setup['calls']:,} calls, {setup['prompt_tokens']:,} prompt tokens, footprint of a run "
            f"{setup['footprint_tokens']:,}; trained on {setup['trained_on_runs']} other runs; cost {setup['cost']}; "
            f"host pool {setup['host_ratio']:g} x device; outputs {setup['outputs']}; seed {setup['seed']}\n"
        )
        text.append(markdown(*rows(result)))
        text.append(_agents(result))
    written = [out / "report.md", out / "report.json"]
    merged = {path.stem: result for path, result in zip(sources, results, strict=True)}
    written[1].write_text(json.dumps(merged, indent=1) + "\n")
    from pbkv_ray.replay.plots import draw

    for path in draw(merged, out):
        written.append(path)
        if path.suffix == ".png":
            text.append(f"![{path.stem}]({path.name})\n")
    written[0].write_text("\n".join(text))
    return written


def _load(path: Path) -> Json:
    try:
        result: Json = json.loads(path.read_text())
        result["pools"], result["setup"]["trace"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{str(path)!r} is no result of `pbkv replay --json` ({error!r})") from None
    return result


def _agents(result: Json) -> str:
    """Device hit per agent, at the fixed order where there is one."""
    tables = []
    for pool, of_pool in result["pools"].items():
        hits = {name: entry.get("fixed_order", entry).get("agent_hit") for name, entry in of_pool["policies"].items()}
        hits = {name: values for name, values in hits.items() if values}
        agents = sorted({agent for values in hits.values() for agent in values})
        if agents:
            body = [[name, *(_text(values.get(agent)) for agent in agents)] for name, values in hits.items()]
            tables.append(f"Device hit per agent, pool {pool}\n\n" + markdown(["policy", *agents], body))
    return "\n".join(tables)

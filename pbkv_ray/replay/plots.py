"""Plots of replay results, PNG and SVG. One figure per question; a figure that has nothing to show is not drawn."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

Json = dict[str, Any]
Series = dict[str, list[tuple[float, float]]]  # line -> (x, y)
_KNOBS = {
    "concurrency": "runs in flight",
    "noise": "noise lambda",
    "K": "steps K",
    "gamma": "gamma",
    "rho": "rho",
}


def draw(results: Mapping[str, Json], out: Path) -> Iterator[Path]:
    """Yields the files written."""
    import matplotlib

    matplotlib.use("Agg")
    for name, result in results.items():
        yield from _lines(out, f"{name}_hit_by_pool", _by_pool(result, _hit), "pool / live footprint", "device hit")
        yield from _lines(
            out, f"{name}_belady_by_pool", _by_pool(result, _share), "pool / live footprint", "share of Belady's hit"
        )
        yield from _bars(out, f"{name}_latency_by_size", result)
    for knob, label in _KNOBS.items():
        for trace, group in _groups(results, knob).items():
            lines = _by_knob(group, knob, _hit)
            yield from _lines(out, f"{trace}_hit_by_{knob}", lines, label, "device hit")
            if knob == "concurrency":
                lines = _by_knob(group, knob, _completion)
                yield from _lines(out, f"{trace}_completion_by_{knob}", lines, label, "mean completion, s")


def _hit(entry: Json) -> float | None:
    value = entry.get("fixed_order", entry).get("device_hit")
    return None if value is None else float(value)


def _share(entry: Json) -> float | None:
    value = entry.get("fixed_order", entry).get("share_of_belady")
    return None if value is None else float(value)


def _completion(entry: Json) -> float | None:
    value = entry.get("completion_seconds", {}).get("mean")
    return None if value is None else float(value)


Pick = Callable[[Json], float | None]


def _by_pool(result: Json, pick: Pick) -> Series:
    lines: Series = {}
    for pool, of_pool in result["pools"].items():
        for name, entry in of_pool["policies"].items():
            if (value := pick(entry)) is not None:
                lines.setdefault(name, []).append((float(pool), value))
    return lines


def _groups(results: Mapping[str, Json], knob: str) -> dict[str, list[Json]]:
    """Results of one trace that differ in `knob`."""
    groups: dict[str, list[Json]] = {}
    for result in results.values():
        if knob in result["setup"]:
            groups.setdefault(result["setup"]["trace"], []).append(result)
    return {t: g for t, g in groups.items() if len({r["setup"][knob] for r in g}) > 1}


def _by_knob(group: list[Json], knob: str, pick: Pick) -> Series:
    lines: Series = {}
    for result in group:
        for pool, of_pool in result["pools"].items():
            for name, entry in of_pool["policies"].items():
                if (value := pick(entry)) is not None:
                    line = name if len(result["pools"]) == 1 else f"{name}, pool {pool}"
                    lines.setdefault(line, []).append((float(result["setup"][knob]), value))
    return {line: sorted(points) for line, points in lines.items()}


def _lines(out: Path, name: str, lines: Series, x: str, y: str) -> Iterator[Path]:
    lines = {line: points for line, points in lines.items() if points}
    if not lines or all(len(points) < 2 for points in lines.values()):
        return
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 4))
    for line, points in lines.items():
        axes.plot(
            *zip(*sorted(points), strict=True), marker="o", label=line, linestyle="--" if line == "belady" else "-"
        )
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    yield from _save(figure, out / name)


def _bars(out: Path, name: str, result: Json) -> Iterator[Path]:
    """Mean run latency by quarter of run size, first pool."""
    of_pool: Json = next(iter(result["pools"].values()), {"policies": {}})
    shown = {n: e["run_seconds_by_size"] for n, e in of_pool["policies"].items() if e.get("run_seconds_by_size")}
    if not shown:
        return
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 4))
    width = 0.8 / len(shown)
    for i, (policy, quarters) in enumerate(shown.items()):
        axes.bar([q + i * width for q in range(len(quarters))], [q["mean"] for q in quarters], width, label=policy)
    labels = [f"<= {q['upto_prompt_tokens']:,}" for q in next(iter(shown.values()))]
    axes.set_xticks([q + 0.4 - width / 2 for q in range(len(labels))], labels)
    axes.set_xlabel("prompt tokens of the run, by quarter")
    axes.set_ylabel("mean run latency, s")
    axes.legend(fontsize=8)
    yield from _save(figure, out / name)


def _save(figure: Any, path: Path) -> Iterator[Path]:
    from matplotlib import pyplot as plt

    figure.tight_layout()
    for suffix in (".png", ".svg"):
        target = path.with_name(path.name + suffix)
        figure.savefig(target, metadata={"Date": None} if suffix == ".svg" else None)
        yield target
    plt.close(figure)

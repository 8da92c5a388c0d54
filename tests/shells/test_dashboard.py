"""Every metric that the Grafana dashboard asks for is one that we, or SGLang, expose."""

import json
import re
from importlib.util import find_spec
from pathlib import Path

from prometheus_client import CollectorRegistry, generate_latest

from deployments.metrics import GatewayMetrics
from deployments.runner_metrics import RunnerMetrics
from pbkv_ray.control.exposition import GAUGES
from pbkv_ray.core.calls import Reply
from pbkv_ray.engine.metrics import EngineMetrics, _Collector
from pbkv_ray.routing.metrics import RouterMetrics

ROOT = Path(__file__).parents[2]


def queries() -> dict[str, list[str]]:
    """Title of a panel -> its queries."""
    dashboard = json.loads((ROOT / "deployments" / "grafana.json").read_text())
    return {panel["title"]: [target["expr"] for target in panel["targets"]] for panel in dashboard["panels"]}


def exposed() -> set[str]:
    """Names of samples, as Prometheus stores them."""
    names = {"pbkv_engine_state"}  # deployments.engine
    engine = EngineMetrics()
    engine.finished(Reply("", "stop", 1, 1, 0, 0, 1.0, 1.0))
    of_engine = CollectorRegistry()
    of_engine.register(_Collector(engine, "a"))
    for registry in (GatewayMetrics().registry, RunnerMetrics().registry, RouterMetrics().registry, of_engine):
        families = [line.split() for line in generate_latest(registry).decode().splitlines() if line[:6] == "# TYPE"]
        for _, _, name, kind in families:
            names |= {name} | (
                {f"{name}_{end}" for end in ("bucket", "sum", "count")} if kind == "histogram" else set()
            )
    # The controller's counters come into being with their first count.
    text = "".join(
        path.read_text() for path in (ROOT / "pbkv_ray").rglob("*.py") if path.parent.name in ("core", "control")
    )
    counted = set(re.findall(r'counts\["(\w+)"\]', text)) | {"hints_dropped"}
    return names | {f"pbkv_controller_{name}_total" for name in counted} | {f"pbkv_controller_{g}" for g in GAUGES}


def test_every_metric_of_the_dashboard_exists():
    asked = {name for exprs in queries().values() for expr in exprs for name in re.findall(r"\bpbkv_\w+", expr)}
    assert asked - exposed() == set()
    assert len(asked) > 20


def test_sglang_exposes_what_is_asked_of_it():
    spec = find_spec("sglang")
    assert spec is not None and spec.origin is not None
    source = (Path(spec.origin).parent / "srt" / "observability" / "metrics_collector.py").read_text()
    asked = {name for exprs in queries().values() for expr in exprs for name in re.findall(r"sglang:\w+", expr)}
    assert {name for name in asked if f'"{name.removesuffix("_bucket")}"' not in source} == set()
    assert asked


def test_panels_do_not_overlap_and_have_a_query_each():
    dashboard = json.loads((ROOT / "deployments" / "grafana.json").read_text())
    places = [tuple(panel["gridPos"].values()) for panel in dashboard["panels"]]
    assert len(set(places)) == len(places)
    assert all(queries().values())
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(places)

"""The controller's counts as a Prometheus text: `pbkv_controller_*`."""

from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

GAUGES = {
    "runs_active": "Runs in flight.",
    "replicas": "Engine replicas that ask for hints.",
    "hints_waiting": "Hints that replicas have not acknowledged.",
    "memory_bytes": "Resident memory of the controller's process.",
    "batch_seconds_p50": "Median time that a batch of events took, of the last 4096.",
    "batch_seconds_p99": "99th percentile of it.",
    "predictor_models_broken": "Model folders that could not be loaded.",
    "predictor_gate_open": "1: the net's forecasts are used, 0: those by counts.",
    "predictor_gate_judged": "Answers that the gate has compared.",
    "predictor_gate_gain_nats": "Log-likelihood an answer by which net and counts together beat counts alone.",
    "recorded_runs_waiting": "Ended runs that wait to be stored.",
}


class _Counts(Collector):
    def __init__(self, counts: Mapping[str, float]) -> None:
        self._counts = counts

    def collect(self) -> Iterator[Metric]:
        by_workflow: dict[str, GaugeMetricFamily] = {}
        for key, value in sorted(self._counts.items()):
            name, _, workflow = key.partition("/")
            if workflow:
                family = GaugeMetricFamily(f"pbkv_controller_{name}", GAUGES[name], labels=["workflow"])
                by_workflow.setdefault(name, family).add_metric([workflow], value)
            elif name in GAUGES:
                yield GaugeMetricFamily(f"pbkv_controller_{name}", GAUGES[name], value=value)
            else:
                text = f"Controller: {name.replace('_', ' ')}."
                yield CounterMetricFamily(f"pbkv_controller_{name.lower()}", text, value=value)
        yield from by_workflow.values()


def controller_text(counts: Mapping[str, float]) -> str:
    registry = CollectorRegistry()
    registry.register(_Counts(counts))
    return generate_latest(registry).decode()

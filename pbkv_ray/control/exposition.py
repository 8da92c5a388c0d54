"""The controller's counts as a Prometheus text: `pbkv_controller_*`."""

from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

GAUGES = {
    "runs_active": "Runs in flight.",
    "replicas": "Engine replicas that ask for hints.",
    "hints_waiting": "Hints that replicas have not acknowledged.",
}


class _Counts(Collector):
    def __init__(self, counts: Mapping[str, float]) -> None:
        self._counts = counts

    def collect(self) -> Iterator[Metric]:
        for name, value in sorted(self._counts.items()):
            if name in GAUGES:
                yield GaugeMetricFamily(f"pbkv_controller_{name}", GAUGES[name], value=value)
            else:
                text = f"Controller: {name.replace('_', ' ')}."
                yield CounterMetricFamily(f"pbkv_controller_{name.lower()}", text, value=value)


def controller_text(counts: Mapping[str, float]) -> str:
    registry = CollectorRegistry()
    registry.register(_Counts(counts))
    return generate_latest(registry).decode()

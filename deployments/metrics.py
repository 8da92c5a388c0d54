"""/metrics: the gateway's own counters, and the texts of the other parts merged into one Prometheus exposition.

A part is asked at scrape time and answers with an exposition text, or with one for each of its replicas. Its
samples get a `part` (and `replica`) label, so that two engines' series stay apart. A part that fails, is slow or
answers no exposition is left out and counted; the scrape succeeds.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

Text = str | Mapping[str, str]
Part = Callable[[], Awaitable[Text]]

log = logging.getLogger(__name__)


class GatewayMetrics:
    """One registry a gateway: two in one process (tests) do not share counters."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.open_requests = Gauge(
            "pbkv_http_open_requests", "Requests being served, streams included.", registry=self.registry
        )
        self._requests = Counter(
            "pbkv_http_requests", "Requests by route and status.", ["route", "method", "status"], registry=self.registry
        )
        self._seconds = Histogram(
            "pbkv_http_request_seconds",
            "Seconds from a request to the end of its answer; a stream's is its whole life.",
            ["route"],
            buckets=(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300),
            registry=self.registry,
        )
        self.refused_keys = Counter(
            "pbkv_http_refused_keys", "Requests without a valid API key.", registry=self.registry
        )
        self._stripped = Counter(
            "pbkv_http_stripped_fields",
            "Fields of requests that only the server may set, dropped.",
            ["field"],
            registry=self.registry,
        )
        self.foreign_runs = Gauge(
            "pbkv_foreign_runs", "Runs of foreign harnesses that the gateway knows.", registry=self.registry
        )
        self.foreign_forgotten = Counter(
            "pbkv_foreign_runs_forgotten",
            "Foreign runs dropped from a full table; their lease ends them.",
            registry=self.registry,
        )
        self.part_failures = Counter(
            "pbkv_metrics_part_failures",
            "Parts that gave no usable text to a scrape.",
            ["part"],
            registry=self.registry,
        )
        self.conflicts = Counter(
            "pbkv_metrics_conflicts",
            "Families dropped because two parts type them differently.",
            registry=self.registry,
        )

    def request(self, route: str, method: str, status: int, seconds: float) -> None:
        # Methods are the client's to invent; labels are not.
        known = method if method in ("GET", "POST", "PATCH", "DELETE", "PUT", "HEAD", "OPTIONS") else "other"
        self._requests.labels(route, known, str(status)).inc()
        self._seconds.labels(route).observe(seconds)

    def stripped(self, field: str) -> None:
        self._stripped.labels(field).inc()


async def exposition(metrics: GatewayMetrics, parts: Mapping[str, Part], *, timeout_s: float, max_bytes: int) -> bytes:
    """The merged text, in Prometheus's format 0.0.4. Never raises for a part's sake."""
    texts = await asyncio.gather(*(_ask(name, part, timeout_s, metrics) for name, part in parts.items()))

    def merge() -> bytes:
        families = _Families(metrics)
        for (name, _), answer in zip(parts.items(), texts, strict=True):
            labelled = {"": answer} if isinstance(answer, str) else answer
            for replica, text in labelled.items():
                labels = {"part": name} | ({"replica": replica} if replica else {})
                families.add(name, text, labels, max_bytes)
        # Ours last: they count the failures of this very scrape.
        families.take(metrics.registry.collect(), {"part": "gateway"})
        return generate_latest(families)

    return await asyncio.to_thread(merge)  # parsing some thousand lines would hold up every stream


async def _ask(name: str, part: Part, timeout_s: float, metrics: GatewayMetrics) -> Text:
    try:
        async with asyncio.timeout(timeout_s):
            return await part()
    except Exception as error:
        metrics.part_failures.labels(name).inc()
        log.warning("no metrics of %s: %r", name, error)
        return {}


class _Families(Collector):
    """Families by name, each with the samples of all parts."""

    def __init__(self, metrics: GatewayMetrics) -> None:
        self._metrics = metrics
        self._families: dict[str, Metric] = {}

    def collect(self) -> Iterable[Metric]:
        return [self._families[name] for name in sorted(self._families)]

    def add(self, part: str, text: str, labels: Mapping[str, str], max_bytes: int) -> None:
        """A text that is too long or does not parse adds nothing."""
        try:
            if len(text) > max_bytes:
                raise ValueError(f"{len(text)} characters, more than {max_bytes}")
            parsed = list(text_string_to_metric_families(text))
        except (ValueError, KeyError, IndexError, TypeError) as error:
            self._metrics.part_failures.labels(part).inc()
            log.warning("the metrics of %s are no exposition: %r", part, error)
            return
        self.take(parsed, labels)

    def take(self, families: Iterable[Metric], labels: Mapping[str, str]) -> None:
        for family in families:
            into = self._families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            if into.type != family.type:
                self._metrics.conflicts.inc()
                continue
            # When a counter was made is not worth doubling the text for.
            kept = (sample for sample in family.samples if not sample.name.endswith("_created"))
            into.samples.extend(_labelled(sample, labels) for sample in kept)


def _labelled(sample: Sample, labels: Mapping[str, str]) -> Sample:
    """A label of ours that the sample has with another value is kept as `exported_...`, as Prometheus does."""
    own = {f"exported_{key}" if labels.get(key, value) != value else key: value for key, value in sample.labels.items()}
    return sample._replace(labels={**own, **labels})

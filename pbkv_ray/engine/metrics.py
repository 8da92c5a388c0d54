"""The engine server's own counters, and SGLang's, in Prometheus text form."""

import atexit
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator
from typing import Any

from pbkv_ray.core.calls import Reply
from pbkv_ray.engine.facts import Overseen

_FOLDER = "PROMETHEUS_MULTIPROC_DIR"


class EngineMetrics:
    """Plain numbers, changed in the server's event loop; labels are bounded by construction."""

    def __init__(self) -> None:
        """Make it before the engine: SGLang's processes write to a folder that must outlive it (`_own_folder`)."""
        _own_folder()
        self.running = 0
        self.left = 0  # calls whose caller left or was cancelled before the end
        self.engine_deaths = 0
        self.calls: Counter[str] = Counter()
        self.tokens: Counter[str] = Counter()
        self.overseen: Overseen | None = None  # the scheduler's latest word on who is in charge of the cache
        self.channels: dict[str, Any] = {}  # "hints", "facts": the counts of their ends (slots dataclasses of ints)

    def finished(self, reply: Reply) -> None:
        self.calls[reply.reason] += 1
        self.tokens["prompt"] += reply.prompt_tokens
        self.tokens["device_cached"] += reply.device_cached_tokens
        self.tokens["host_cached"] += reply.host_cached_tokens
        self.tokens["output"] += reply.output_tokens

    def text(self, replica: str) -> str:
        """`pbkv_engine_*` and whatever SGLang's processes have written to their shared metrics folder."""
        from prometheus_client import CollectorRegistry, generate_latest, multiprocess, values

        ours = CollectorRegistry()
        ours.register(_Collector(self, replica))
        text = generate_latest(ours).decode()
        if os.environ.get(_FOLDER):
            theirs = CollectorRegistry()
            multiprocess.MultiProcessCollector(theirs)  # type: ignore[no-untyped-call]
            if not values.ValueClass._multiprocess:
                theirs.register(_InThisProcess())
            text += generate_latest(theirs).decode()
        return text


class _InThisProcess:
    """What SGLang's tokenizer manager counts, where prometheus_client was imported before the folder had a name: it
    then keeps this process's values in memory, and only the other processes write to the folder."""

    def collect(self) -> Iterator[Any]:
        from prometheus_client import REGISTRY

        return (family for family in REGISTRY.collect() if family.name.startswith("sglang:"))


def _own_folder() -> None:
    """SGLang keeps its folder in a variable; a second engine in the process overwrites it, which deletes the folder."""
    if not os.environ.get(_FOLDER):
        os.environ[_FOLDER] = tempfile.mkdtemp(prefix="pbkv-metrics-")
        atexit.register(shutil.rmtree, os.environ[_FOLDER], ignore_errors=True)


class _Collector:
    def __init__(self, metrics: EngineMetrics, replica: str) -> None:
        self._metrics, self._replica = metrics, replica

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        metrics, replica = self._metrics, self._replica
        running = GaugeMetricFamily("pbkv_engine_running_calls", "Calls in the engine now.", labels=["replica"])
        running.add_metric([replica], metrics.running)
        yield running
        left = CounterMetricFamily("pbkv_engine_left_calls", "Calls whose caller left early.", labels=["replica"])
        left.add_metric([replica], metrics.left)
        yield left
        deaths = CounterMetricFamily("pbkv_engine_deaths", "Engines lost to a dead process.", labels=["replica"])
        deaths.add_metric([replica], metrics.engine_deaths)
        yield deaths
        calls = CounterMetricFamily("pbkv_engine_calls", "Finished calls by reason.", labels=["replica", "reason"])
        for reason, count in sorted(metrics.calls.items()):
            calls.add_metric([replica, reason], count)
        yield calls
        tokens = CounterMetricFamily("pbkv_engine_tokens", "Tokens by kind.", labels=["replica", "kind"])
        for kind, count in sorted(metrics.tokens.items()):
            tokens.add_metric([replica, kind], count)
        yield tokens
        if metrics.overseen is not None:
            yield from _overseen(metrics.overseen, replica)
        for channel, count in metrics.channels.items():
            what = f"What became of the {channel} between server and scheduler."
            events = CounterMetricFamily(f"pbkv_engine_{channel}", what, labels=["replica", "event"])
            for event in count.__slots__:
                events.add_metric([replica, event], getattr(count, event))
            yield events


def _overseen(seen: Overseen, replica: str) -> Iterator[Any]:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    what = "Prompt tokens, those found on the device, and those that LRU would have found (estimated)."
    tokens = CounterMetricFamily("pbkv_engine_shadow_tokens", what, labels=["replica", "kind"])
    for kind, value in (("prompt", seen.prompt), ("hit", seen.hit), ("lru_hit", seen.lru)):
        tokens.add_metric([replica, kind], value)
    yield tokens
    state = GaugeMetricFamily(
        "pbkv_engine_shadow_state",
        "1: in charge of the cache (policy, fallback, ordered).",
        labels=["replica", "state"],
    )
    for name in ("policy", "fallback", "ordered"):
        state.add_metric([replica, name], float(seen.state == name))
    yield state
    turns = CounterMetricFamily(
        "pbkv_engine_shadow_turns", "LRU took over from the policy, or gave back.", labels=["replica", "to"]
    )
    turns.add_metric([replica, "fallback"], seen.fallbacks)
    turns.add_metric([replica, "policy"], seen.returns)
    yield turns
    gauges: dict[str, tuple[float, str]] = {
        "debt_tokens": (seen.debt, "Lost against LRU beyond the allowance."),
        "rest_tokens": (seen.rest, "Prompt tokens until the policy is tried again."),
        "error": (seen.error, "Share of prompt tokens by which the estimate was seen to be too high."),
        "failures": (seen.failures, "Failures of the estimate; above 0 it is off."),
    }
    for name, (number, help_text) in gauges.items():
        gauge = GaugeMetricFamily(f"pbkv_engine_shadow_{name}", help_text, labels=["replica"])
        gauge.add_metric([replica], number)
        yield gauge

"""What a runner counts, in a Prometheus registry of its own."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from pbkv_ray.core.gate import Gate


class RunnerMetrics:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.running = Gauge("pbkv_runs_running", "Runs that this runner executes", registry=self.registry)
        self.pending = Gauge("pbkv_runs_pending", "Runs that wait, over all runners", registry=self.registry)
        self.created = self._counter("pbkv_runs_created", "Runs accepted", "workflow")
        self.ended = self._counter("pbkv_runs_ended", "Runs ended", "workflow", "status")
        self.refused = self._counter("pbkv_runs_refused", "Runs refused", "reason")
        self.taken_over = self._counter("pbkv_runs_taken_over", "Runs taken over from a silent runner")
        self.given_up = self._counter("pbkv_runs_given_up", "Runs failed after their last attempt")
        self.lost = self._counter("pbkv_runs_lost", "Runs that another runner took from this one")
        self.stuck = self._counter("pbkv_runs_stuck", "Stopped runs whose graph did not let go in time")
        self.events = self._counter("pbkv_run_events", "Stream events stored")
        self.events_dropped = self._counter("pbkv_run_events_dropped", "Stream events dropped", "reason")
        self.calls_dropped = self._counter("pbkv_run_calls_dropped", "LLM calls beyond a run's record")
        self.emit_errors = self._counter("pbkv_emit_errors", "Lifecycle events that could not be emitted")
        self.store_errors = self._counter("pbkv_store_errors", "Store operations that failed and were retried")
        self._held = Gauge("pbkv_runs_held", "1: new runs wait, as the live set does not fit", registry=self.registry)
        self._limit = Gauge("pbkv_admission_limit", "Runs that may be in flight under pressure", registry=self.registry)
        self._thrash = Gauge(
            "pbkv_admission_thrash",
            "Share of the engines' time that recomputes what was evicted",
            registry=self.registry,
        )
        self.seconds = Histogram(
            "pbkv_run_seconds",
            "Time from start to end of a run",
            ("workflow",),
            registry=self.registry,
            buckets=(0.1, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800),
        )

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(name, text, labels, registry=self.registry)

    def gate(self, gate: Gate, held: bool) -> None:
        self._held.set(held)
        self._limit.set(gate.rule.limit)
        self._thrash.set(gate.rule.thrash)

    def text(self) -> str:
        return generate_latest(self.registry).decode()

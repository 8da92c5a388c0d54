"""What the routers of this process count, as a Prometheus text: `pbkv_router_*`."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest


class RouterMetrics:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.calls = Counter(
            "pbkv_router_calls",
            "Calls routed by cost, by why the replica was chosen",
            ("reason",),
            registry=self.registry,
        )
        self.fallbacks = Counter(
            "pbkv_router_fallbacks", "Calls left to power of two choices", ("cause",), registry=self.registry
        )
        self.consults = Counter(
            "pbkv_router_consults", "Questions to the controller for unknown runs", ("outcome",), registry=self.registry
        )
        self.seconds = Histogram(
            "pbkv_router_seconds",
            "Time to choose a replica, a consult included",
            registry=self.registry,
            buckets=(0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5),
        )
        self.syncs = Counter(
            "pbkv_router_syncs", "Updates of the table, by how they went", ("outcome",), registry=self.registry
        )
        self.moves_lost = Counter(
            "pbkv_router_moves_lost", "Moves of runs that the controller was not told of", registry=self.registry
        )
        self.runs = Gauge("pbkv_router_table_runs", "Runs in the copy of the routing table", registry=self.registry)


METRICS = RouterMetrics()  # one a process: Serve makes the routers, and asks nobody


def router_text() -> str:
    return generate_latest(METRICS.registry).decode()

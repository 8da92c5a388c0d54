"""Several simulated replicas behind a router: the same scheduler and cache as one (simulate.py), one clock each.

Whoever is furthest behind goes first, so a replica runs ahead of an arrival by one batch at most. Forecasts and endings
reach every replica at once, as the controller sends them; reports of residency and queues come once a second.
"""

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pbkv_ray.core.forecast import Forecast
from pbkv_ray.engine.queue import Queue
from pbkv_ray.predict.counts import VariableOrderCounts
from pbkv_ray.replay.arrivals import Arrivals, ToolWaits
from pbkv_ray.replay.cost import Cost
from pbkv_ray.replay.driver import Driver, StockDriver
from pbkv_ray.replay.forecasts import Forecasts
from pbkv_ray.replay.hits import Hits
from pbkv_ray.replay.keys import Keys
from pbkv_ray.replay.outcome import RunTimes, Scheduler
from pbkv_ray.replay.owned import OwnedDriver
from pbkv_ray.replay.policies import STOCK
from pbkv_ray.replay.routers import Asks, Report, Router
from pbkv_ray.replay.simulate import Simulation
from pbkv_ray.replay.tree import TreeOptions
from pbkv_ray.replay.workload import Workload

REPORT_S = 1.0


class Replica(Simulation):
    """One engine of a cluster: it gets calls one by one, and tells the cluster what it has answered."""

    def __init__(self, answered: Callable[["Replica", int, int], None], events: list[Any], *args: Any) -> None:
        super().__init__(*args)
        self._answered = answered
        self._events = events  # the cluster's: decode jumps end at the next arrival anywhere
        self._unsubmitted.clear()
        self.in_flight = 0
        self.idle = True
        self.cached: dict[tuple[int, int], int] = {}  # tokens that an unanswered call has found, by run and call
        owned = isinstance(self.driver, OwnedDriver)
        self._queue = Queue(self.driver.tree.cache.tree_core) if owned else None

    def take(self, run: int, call: int, at_s: float) -> None:
        if self.idle:
            self.now = max(self.now, at_s)
            self.idle = False
        self.in_flight += 1
        self._arrive(run, call, at_s)

    def step(self) -> None:
        """One batch; afterwards idle if there was none to make."""
        self.idle = not (self._prefill() or self._decode())

    def _ended(self, run: int, call: int) -> None:
        self.in_flight -= 1
        self._answered(self, run, call)

    def _first_token(self, call: Any) -> None:
        request = call.request
        self.cached[call.run, call.call] = (request.device_hit + request.host_hit) * self.keys.unit_tokens
        super()._first_token(call)

    @property
    def stuck(self) -> int:
        return len(self._waiting)

    def report(self) -> Report:
        """As the engine's plug-in makes it; stock engines report their queue only."""
        unit, waiting = self.keys.unit_tokens, 0
        for call in self._waiting:
            known = 0 if self._queue is None else self._queue.cached_tokens(call.request)
            waiting += max(1, call.prompt_tokens - known * unit)
        if self._chunked is not None:
            waiting += (self._chunked.prompt - self._chunked.request.allocated) * unit
        held = self.driver.index.residency() if isinstance(self.driver, OwnedDriver) else {}
        return Report(held, waiting, 1.0 / self.cost.token_s, self.cost.transfer_tokens_s)


@dataclass(slots=True)
class ClusterOutcome:
    """Simulated seconds. `hits` and `computed` (prompt tokens) by replica."""

    runs: dict[int, RunTimes] = field(default_factory=dict)
    hits: list[Hits] = field(default_factory=list)
    ttft_s: list[float] = field(default_factory=list)
    busy_s: list[float] = field(default_factory=list)
    makespan_s: float = 0.0
    homes: list[int] = field(default_factory=list)  # replicas that a run has called

    def as_json(self) -> dict[str, Any]:
        computed = np.array([hits.recomputed for hits in self.hits], float)
        prompt = sum(hits.prompt for hits in self.hits)
        lived = [times.ended_s - times.started_s for times in self.runs.values()]
        p50, p99 = np.percentile(lived, [50, 99])
        return {
            "device_hit": round(sum(hits.device for hits in self.hits) / max(1, prompt), 4),
            "host_hit": round(sum(hits.host for hits in self.hits) / max(1, prompt), 4),
            "run_seconds": {
                "mean": round(float(np.mean(lived)), 3),
                "p50": round(float(p50), 3),
                "p99": round(float(p99), 3),
            },
            "ttft_seconds": {"p50": round(float(np.median(self.ttft_s)), 3), "p99": _p99(self.ttft_s)},
            "imbalance": round(float(computed.max() / max(1.0, computed.mean())), 3),
            "computed_tokens": int(computed.sum()),
            "replicas_per_run": round(float(np.mean(self.homes)), 2),
            "busy_share": round(float(np.mean(self.busy_s)) / max(1e-9, self.makespan_s), 3),
            "wall_seconds": round(self.makespan_s, 1),
        }


def _p99(values: Sequence[float]) -> float:
    return round(float(np.percentile(values, 99)), 3)


class Cluster:
    """One workload, closed loop of `concurrency` runs in all. `run()` once."""

    def __init__(
        self,
        workload: Workload,
        keys: Keys,
        drivers: Sequence[Driver],
        router: Router,
        cost: Cost,
        capacity: int,
        scheduler: Scheduler,
        waits: ToolWaits,
        arrivals: Arrivals,
        seed: int = 0,
    ) -> None:
        """capacity: device units of each replica."""
        self._workload, self._router, self._waits, self._seed = workload, router, waits, seed
        self._keys, self._arrivals, self._scheduler = keys, arrivals, scheduler
        self._events: list[tuple[float, int, int, int]] = []
        self._sequence = 0
        self._unsubmitted = deque(range(len(workload.runs)))
        self._seen: dict[int, set[int]] = {}
        self._report_s = 0.0
        self.outcome = ClusterOutcome()
        self.replicas = [
            Replica(self._answered, self._events, workload, keys, driver, cost, capacity, scheduler)
            for driver in drivers
        ]
        for replica in self.replicas:
            replica.outcome.runs = self.outcome.runs

    def run(self) -> ClusterOutcome:
        self._submit_first()
        while True:
            busy = min((r for r in self.replicas if not r.idle), key=lambda r: r.now, default=None)
            if self._events and (busy is None or self._events[0][0] <= busy.now):
                at_s, _, run, call = heapq.heappop(self._events)
                self._reports(at_s)
                self._call(run, call, at_s)
            elif busy is not None:
                busy.step()
            else:
                break
        out = self.outcome
        assert not any(replica.stuck for replica in self.replicas)
        out.makespan_s = max(replica.now for replica in self.replicas)
        for replica in self.replicas:
            out.hits.append(replica.outcome.hits)
            out.ttft_s += replica.outcome.ttft_s
            out.busy_s.append(replica.outcome.prefill_s + replica.outcome.decode_s + replica.outcome.load_s)
        out.homes = [len(seen) for seen in self._seen.values()]
        return out

    def _submit_first(self) -> None:
        if self._arrivals.kind in ("poisson", "trace"):
            for run, at_s in enumerate(self._arrivals.submit_s(self._workload, self._seed)):
                self._push(at_s, run, 0)
            self._unsubmitted.clear()
            return
        for n in range(min(self._scheduler.concurrency, len(self._unsubmitted))):
            self._push(n * 0.05, self._unsubmitted.popleft(), 0)

    def _push(self, at_s: float, run: int, call: int) -> None:
        self._sequence += 1
        heapq.heappush(self._events, (at_s, self._sequence, run, call))

    def _reports(self, now_s: float) -> None:
        if self._router.wants_reports and now_s >= self._report_s:
            self._report_s = now_s + REPORT_S
            for number, replica in enumerate(self.replicas):
                self._router.report(number, replica.report(), now_s)

    def _call(self, run: int, call: int, at_s: float) -> None:
        item = self._workload.runs[run]
        if call == 0:
            self.outcome.runs[run] = RunTimes(at_s, at_s)
        prompt = self._keys.prompt(run, call).tolist()
        asks = Asks(item.run_id, item.tags.get("parent"), prompt, item.calls[call].prompt_tokens, at_s)
        chosen = self._router.choose(asks, [replica.in_flight for replica in self.replicas])
        self._seen.setdefault(run, set()).add(chosen)
        self.replicas[chosen].take(run, call, at_s)

    def _answered(self, replica: Replica, run: int, call: int) -> None:
        item, now_s = self._workload.runs[run], replica.now
        number = self.replicas.index(replica)
        history = item.agents[: call + 1]
        replica.driver.call_finished(item.run_id, item.workflow, history, item.calls[call].output_tokens, now_s)
        cached = replica.cached.pop((run, call), 0)
        self._router.finished(item.run_id, number, item.calls[call].prompt_tokens, cached)
        if call + 1 < len(item.calls):
            self._push(now_s + self._waits.wait_s(item, call + 1, self._seed), run, call + 1)
            return
        for other in self.replicas:
            other.driver.run_ended(item.run_id, item.workflow, item.agents, now_s)
        self._router.ended(item.run_id)
        self.outcome.runs[run].ended_s = now_s
        if self._unsubmitted:
            self._push(now_s, self._unsubmitted.popleft(), 0)


class _Shared:
    """What the drivers of one cluster have in common: a controller's forecasts, which go to all."""

    def __init__(self) -> None:
        self.forecasts = Forecasts(VariableOrderCounts())
        self.drivers: list[ClusterDriver] = []
        self.version = 0


class ClusterDriver(OwnedDriver):
    """One replica's cache under a policy of ours, steered by the controller that all replicas share."""

    def __init__(self, shared: _Shared, policy: str, base: TreeOptions, unit_tokens: int) -> None:
        super().__init__(policy, base, unit_tokens, forecasts=shared.forecasts)
        self._shared = shared
        shared.drivers.append(self)

    def _publish(self, run_id: str, workflow: str, forecast: Forecast | None, made_s: float) -> None:
        self._shared.version += 1
        for driver in self._shared.drivers:
            driver._hear(run_id, workflow, forecast, self._shared.version, made_s)


def make_drivers(policy: str, replicas: int, base: TreeOptions, unit_tokens: int) -> list[Driver]:
    """Fresh caches of one cluster."""
    if policy in STOCK:
        return [StockDriver(policy, base, unit_tokens) for _ in range(replicas)]
    shared = _Shared()
    return [ClusterDriver(shared, policy, base, unit_tokens) for _ in range(replicas)]

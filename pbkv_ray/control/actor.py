"""The controller as a Ray actor: the clock, the outboxes and the long polls around `core.controller`.

The actor is detached and named per application, restarts for ever, and repeats no call by itself: a call that kills
it would otherwise kill it again (reference: Ray retries actor tasks in flight). Callers retry.
"""

import asyncio
import uuid
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from time import perf_counter, sleep, time
from typing import Any

import numpy as np
import psutil
import ray
from ray.exceptions import RayError

from pbkv_ray.config import ControllerOptions
from pbkv_ray.control.desk import COALESCE_S, RoutingDesk
from pbkv_ray.control.prediction import Prediction
from pbkv_ray.control.recording import Recording
from pbkv_ray.core.actions import Action
from pbkv_ray.core.controller import Controller
from pbkv_ray.core.events import Batch, CallState, ReplicaJoined, ReplicaLeft, Residency, Tick
from pbkv_ray.core.live import LiveView
from pbkv_ray.core.outbox import Outbox

NAMESPACE = "pbkv"
TICK_S = 1.0
SLICE = 2048  # events handled at a stretch
SILENT_REPLICA_S = 30.0


class ControllerHost(RoutingDesk):
    """Plain class, all methods async, one event loop: no lock is needed."""

    def __init__(self, options: ControllerOptions) -> None:
        self.epoch = uuid.uuid4().hex[:12]
        self._made_of = made_of(options)
        self._prediction = Prediction(options, lambda event: self._perform(self._controller.handle(event)))
        self._controller = Controller(options, self._prediction.predictor)
        self._prediction.follow(self._controller)
        self._recording = Recording(options)
        if options.record_to:
            self._controller.listeners.append(self._recording.heard)
        self._open_desk(self._controller, options.max_runs)
        self._live = LiveView(self._controller)
        self._outboxes: dict[str, Outbox] = {}
        self._news: dict[str, asyncio.Event] = {}
        self._counts: Counter[str] = Counter()
        self._took: deque[float] = deque(maxlen=4_096)  # seconds a slice of a batch
        self._process = psutil.Process()
        self._ordered_policy: str | None = None
        self._ticking: asyncio.Task[None] | None = None

    async def events(self, batch: Batch) -> str:
        """Returns the controller's epoch; a new one tells runners to announce their runs again."""
        self._ensure_ticking()
        for first in range(0, len(batch.events), SLICE):
            started = perf_counter()
            part = replace(batch, sequence=batch.sequence + first, events=batch.events[first : first + SLICE])
            self._perform(self._controller.receive(part))
            self._took.append(perf_counter() - started)
            await asyncio.sleep(0)  # a router that asks for a place does not wait for all of it
        return self.epoch

    async def hints(
        self, replica: str, engine_epoch: str, known_epoch: str | None, acknowledged: int, timeout_s: float
    ) -> tuple[str, int, Sequence[Action]]:
        """Long poll of a replica: (controller epoch, number to acknowledge, actions), empty after `timeout_s`.

        `acknowledged` counts only if it was given out under this controller's epoch.
        """
        self._ensure_ticking()
        acknowledged = acknowledged if known_epoch == self.epoch else 0
        self._perform(self._controller.handle(ReplicaJoined(replica, engine_epoch, time())))
        outbox = self._outboxes.setdefault(replica, Outbox())
        loop = asyncio.get_running_loop()
        # What changes in one moment travels together: a busy cluster would else pay for every change by itself.
        if (early_s := outbox.told_s + COALESCE_S - loop.time()) > 0:
            await asyncio.sleep(early_s)
        number, actions = outbox.take(acknowledged)
        if not actions:
            news = self._news.setdefault(replica, asyncio.Event())
            news.clear()
            try:
                async with asyncio.timeout(timeout_s):
                    await news.wait()
            except TimeoutError:
                return self.epoch, acknowledged, ()
            number, actions = outbox.take(acknowledged)
        outbox.told_s = loop.time()
        return self.epoch, number, actions

    async def made_of(self) -> str:
        return self._made_of

    async def report(self, residency: Residency, numbers: Mapping[str, float] | None = None) -> None:
        """`numbers`: what the engine says of itself beside it, for those who watch (`core.live`)."""
        if numbers:
            self._live.reported(residency.replica, residency.epoch, numbers)
        # Who is silent is decided by one clock: an engine's own stands still while nobody calls it.
        self._perform(self._controller.handle(replace(residency, at_s=time())))

    async def order_policy(self, policy: str) -> None:
        """The cache policy that was ordered of all engines: for those that start later."""
        self._ordered_policy = policy

    async def ordered_policy(self) -> str | None:
        """The latest order; None: engines keep to what they were started with."""
        return self._ordered_policy

    async def states(self, states: Sequence[CallState], dropped: int) -> None:
        self._counts["states_dropped"] += dropped
        self._perform(self._controller.handle(*states))

    async def leave(self, replica: str) -> None:
        """The replica stops in an orderly way, and says so instead of falling silent."""
        self._forget(replica)
        self._perform(self._controller.handle(ReplicaLeft(replica, time())))

    async def runs(self, limit: int = 100) -> list[dict[str, Any]]:
        """The runs in flight, most recently seen last."""
        shown = list(self._controller.runs)[-limit:]
        return [
            {
                "run_id": run.run_id,
                "workflow": run.workflow,
                "agents": list(run.history),
                "entered": [agent for agent, _ in run.entered],
                "waiting_for": run.waiting_for,
                "calls_in_flight": len(run.calls),
                "calls": run.totals.calls,
                "prompt_tokens": run.totals.prompt_tokens,
                "device_cached_tokens": run.totals.device_cached_tokens,
                "host_cached_tokens": run.totals.host_cached_tokens,
                "started_s": run.started_s,
                "seen_s": run.seen_s,
                "home": run.home,
            }
            for run in shown
        ]

    async def live(self, limit: int = 500) -> dict[str, Any]:
        """One snapshot for the live page, with rows of the `limit` oldest runs (`core.live.LiveView.snapshot`)."""
        self._ensure_ticking()
        return self._live.snapshot(time(), limit)

    async def replicas(self) -> dict[str, dict[str, Any]]:
        """Replica -> what it is credited with: runs held, device and host tokens, tokens queued for prefill."""
        return {
            replica: {
                "epoch": known.epoch,
                "seen_s": known.seen_s,
                "runs": len(known.tokens),
                "device_tokens": sum(device for device, _ in known.tokens.values()),
                "host_tokens": sum(host for _, host in known.tokens.values()),
                "queued_prefill_tokens": known.queued_prefill_tokens,
            }
            for replica, known in self._controller.replicas.items()
        }

    async def outcome(self, run_id: str) -> str | None:
        """How the run ended, "running" if it has not, or None when it is not known (any more)."""
        if self._controller.runs.get(run_id) is not None:
            return "running"
        return self._controller.runs.outcome(run_id)

    async def counts(self) -> dict[str, float]:
        """Counters and gauges for /metrics, without the `pbkv_controller_` prefix."""
        return {
            **self._controller.counts,
            **self._counts,
            **self._prediction.counts(),
            **self._recording.counts(),
            **self._placing.routes.counts,
            **self._batch_seconds(),
            "memory_bytes": self._process.memory_info().rss,
            "runs_active": len(self._controller.runs),
            "replicas": len(self._controller.replicas),
            "hints_waiting": sum(map(len, self._outboxes.values())),
            "hints_dropped": sum(outbox.dropped for outbox in self._outboxes.values()),
        }

    def _batch_seconds(self) -> dict[str, float]:
        if not self._took:
            return {}
        p50, p99 = np.percentile(self._took, (50, 99))
        return {"batch_seconds_p50": float(p50), "batch_seconds_p99": float(p99)}

    def _forget(self, replica: str) -> None:
        self._outboxes.pop(replica, None)
        self._news.pop(replica, None)

    def _perform(self, actions: Sequence[Action]) -> None:
        self._routes_follow(actions)
        self._live.performed(actions)
        for action in actions:
            self._counts[f"action_{type(action).__name__}"] += 1
            for replica, outbox in self._outboxes.items():
                outbox.put(action)
                if (news := self._news.get(replica)) is not None:
                    news.set()

    def _ensure_ticking(self) -> None:
        self._prediction.start()
        self._recording.start()
        if self._ticking is None or self._ticking.done():
            self._ticking = asyncio.get_running_loop().create_task(self._tick())

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            now_s = time()
            silent = [r for r, known in self._controller.replicas.items() if known.seen_s < now_s - SILENT_REPLICA_S]
            for replica in silent:
                self._forget(replica)
            self._perform(self._controller.handle(*(ReplicaLeft(r, now_s) for r in silent), Tick(now_s)))
            self._live.tick(now_s)


def controller_name(application: str) -> str:
    return f"pbkv-controller-{application}"


def renew_controller(application: str, options: ControllerOptions, timeout_s: float = 5.0) -> bool:
    """Ends a controller of another version or of other options, so that the next `start_controller` makes one.

    A detached actor outlives the deployment that made it. All that it knows is told anew; one that does not answer in
    `timeout_s` is left alone. Blocks; called where an application starts, never where it only goes on.
    """
    try:
        actor = ray.get_actor(controller_name(application), namespace=NAMESPACE)
        if ray.get(actor.made_of.remote(), timeout=timeout_s) == made_of(options):
            return False
    except AttributeError:
        pass  # of a version that could not be asked
    except (ValueError, RayError):
        return False
    ray.kill(actor)
    for _ in range(100):  # until its name is free
        try:
            ray.get_actor(controller_name(application), namespace=NAMESPACE)
        except ValueError:
            break
        sleep(0.05)
    return True


def made_of(options: ControllerOptions) -> str:
    return f"{version('pbkv-ray')} {options}"


def start_controller(application: str, options: ControllerOptions) -> Any:
    """The application's controller, started if there is none. Any process of the cluster may call this."""
    actor = ray.remote(ControllerHost)
    return actor.options(
        name=controller_name(application),
        namespace=NAMESPACE,
        lifetime="detached",
        get_if_exists=True,
        max_restarts=-1,
        max_task_retries=0,
        num_cpus=0,
        max_concurrency=1_000,
    ).remote(options)


def stop_controller(application: str) -> None:
    """Ends the application's controller; no-op when there is none."""
    try:
        ray.kill(ray.get_actor(controller_name(application), namespace=NAMESPACE))
    except ValueError:
        return

"""`pbkv bench controller`: events of many runs into a real controller actor, at a rate, from several sources.

First the core alone, in CPU time, which a busy machine does not change; then a real actor, by the clock.

A source has one batch in flight, as `control.pump` has; replicas poll for hints and acknowledge them. Run ids are
what clients might choose. Handling times are taken in the actor; a round trip is a batch's, with the network.
"""

import asyncio
import gc
import random
from collections.abc import Callable, Iterator
from itertools import islice
from time import monotonic, perf_counter, thread_time, time
from typing import Any

import numpy as np
import psutil
import ray

from deployments.app import start_ray
from pbkv_ray.config import ControllerOptions
from pbkv_ray.control.actor import start_controller, stop_controller
from pbkv_ray.control.client import ControllerClient
from pbkv_ray.core.controller import Controller
from pbkv_ray.core.events import (
    AgentEntered,
    AgentLeft,
    Batch,
    CallFinished,
    CallStarted,
    Event,
    ReplicaJoined,
    RunEnded,
    RunStarted,
    ToolWaiting,
)
from pbkv_ray.errors import UnavailableError
from pbkv_ray.predict.counts import VariableOrderCounts

APPLICATION = "pbkv-bench-controller"
AGENTS = ("planner", "coder", "tester", "analyser", "committer")
EDGES = tuple((one, other) for one in AGENTS for other in AGENTS if one != other)
CALLS = 8  # of a run
ABREAST = 50  # runs of a source at a time


def events_of(source: int, clock: Callable[[], float] = time) -> Iterator[Event]:
    """Runs without end, `ABREAST` at a time, their steps interleaved."""
    dice = random.Random(source)

    def run(number: int) -> Iterator[tuple[Event, ...]]:
        name = f"ext:{source}:{number}:" + "\u2603" * dice.randrange(60)
        yield (RunStarted(name, "swe", clock(), AGENTS, EDGES),)
        at = 0
        for step in range(CALLS):
            agent, call = AGENTS[at], f"{name[:40]}-{step}"
            yield AgentEntered(name, agent, step, clock()), CallStarted(name, agent, step, call, clock())
            finished = CallFinished(
                name, agent, step, call, clock(), "stop", 2_000, 200, 1_500, 200, 1.0, f"r{source % 2}"
            )
            yield finished, AgentLeft(name, agent, step, clock()), ToolWaiting(name, "tool", step, clock())
            at = (at + 1) % 5 if dice.random() < 0.8 else dice.randrange(5)
        yield (RunEnded(name, "completed", clock()),)

    number = ABREAST
    going = [run(n) for n in range(ABREAST)]
    while True:
        for place, steps in enumerate(going):
            said = next(steps, None)
            if said is None:
                going[place] = run(number)
                number += 1
            else:
                yield from said


def core(batches: int, sources: int, batch: int, clock_step_s: float) -> dict[str, Any]:
    """{"events_per_cpu_s", "batch_cpu_ms": {"p50", "p99"}, "memory_mb": [a quarter of the way, half, ...]}"""
    controller = Controller(ControllerOptions(), VariableOrderCounts())
    process, now_s = psutil.Process(), [time()]
    controller.handle(*(ReplicaJoined(replica, "epoch", now_s[0]) for replica in ("r0", "r1")))
    streams = [events_of(source, lambda: now_s[0]) for source in range(sources)]
    took: list[float] = []
    memory: list[float] = []
    for number in range(batches):
        chosen = tuple(islice(streams[number % sources], batch))
        started = thread_time()
        controller.receive(Batch(f"source {number % sources}", number // sources * batch, chosen))
        took.append(thread_time() - started)
        now_s[0] += clock_step_s
        if number % max(1, batches // 4) == batches // 4 - 1:
            memory.append(round(process.memory_info().rss / 1e6, 1))
    return {
        "events_per_cpu_s": round(batches * batch / sum(took)),
        "batch_cpu_ms": {f"p{q}": round(1_000 * float(np.percentile(took, q)), 3) for q in (50, 99)},
        "memory_mb": memory,
    }


def measure(rate: int, seconds: float, sources: int, batch: int) -> dict[str, Any]:
    """{"core", "events_per_s", "handled_ms": {"p50", "p99"}, "round_trip_ms": {...}, "memory_mb": [...], "counts",
    "setup"}"""
    alone = core(round(rate * seconds / batch), sources, batch, batch / rate)
    start_ray(2)
    try:
        start_controller(APPLICATION, ControllerOptions())
        found = asyncio.run(_drive(rate, seconds, sources, batch))
        return (
            {"core": alone} | found | {"setup": {"rate": rate, "seconds": seconds, "sources": sources, "batch": batch}}
        )
    finally:
        stop_controller(APPLICATION)
        ray.shutdown()


async def _drive(rate: int, seconds: float, sources: int, batch: int) -> dict[str, Any]:
    client = ControllerClient(APPLICATION, timeout_s=60.0)
    await client.counts()  # it has started
    # Made beforehand: this process shares the machine's cores with the controller that it measures.
    at_s, batches = time(), 1 + int(rate * seconds / (batch * sources))
    made = [
        [tuple(islice(events, batch)) for _ in range(batches)]
        for events in (events_of(source, lambda: at_s) for source in range(sources))
    ]
    gc.freeze()
    began = monotonic()
    trips: list[float] = []
    sent = [0] * sources
    memory: list[float] = []
    late = 0

    async def send(source: int) -> None:
        nonlocal late
        every_s = batch * sources / rate
        for number, chosen in enumerate(made[source], 1):
            if monotonic() - began >= seconds:
                break
            started = perf_counter()
            await client.send(Batch(f"source {source}", sent[source], chosen))
            trips.append(perf_counter() - started)
            sent[source] += batch
            wait_s = began + number * every_s - monotonic()
            late += wait_s < 0
            await asyncio.sleep(max(0.0, wait_s))

    async def poll(replica: str) -> None:
        own = ControllerClient(APPLICATION, timeout_s=60.0)
        while True:
            try:
                await own.hints(replica, "epoch", wait_s=0.5)
            except UnavailableError:
                await asyncio.sleep(0.5)

    async def watch() -> None:
        while True:
            memory.append(round((await client.counts())["memory_bytes"] / 1e6, 1))
            await asyncio.sleep(max(1.0, seconds / 10))

    helpers = [asyncio.create_task(work) for work in (poll("r0"), poll("r1"), watch())]
    await asyncio.gather(*(send(source) for source in range(sources)))
    took_s = monotonic() - began
    counts = await client.counts()
    for helper in helpers:
        helper.cancel()
    await asyncio.gather(*helpers, return_exceptions=True)
    kept = ("events", "events_lost", "events_duplicate", "runs_active", "runs_completed", "calls_not_learned",
            "hints_dropped", "hints_waiting")  # fmt: skip
    return {
        "events_per_s": round(sum(sent) / took_s),
        "late_batches": late / max(1, len(trips)),
        "handled_ms": {name: round(1_000 * counts[f"batch_seconds_{name}"], 3) for name in ("p50", "p99")},
        "round_trip_ms": {f"p{q}": round(1_000 * float(np.percentile(trips, q)), 3) for q in (50, 99)},
        "memory_mb": memory,
        "counts": {name: counts.get(name, 0) for name in kept},
    }

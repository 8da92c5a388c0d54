"""Runs of one workflow in this process, recorded: an engine, the controller, the graph. No Ray, no HTTP."""

import asyncio
import hashlib
import json
import os
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Any

from deployments.steering import state_of
from pbkv_ray.config import ControllerOptions, EngineOptions
from pbkv_ray.control.actor import ControllerHost
from pbkv_ray.control.pump import EventPump
from pbkv_ray.core.events import Batch
from pbkv_ray.engine.facts import Fact, HiddenState
from pbkv_ray.engine.server import EngineServer
from pbkv_ray.graph.callback import LifecycleCallback
from pbkv_ray.graph.client import LLM
from pbkv_ray.graph.context import RunContext, running
from workflows.spec import WorkflowSpec

Json = dict[str, Any]
STORED_S = 60  # how long to wait for the last runs to reach the store
_LOSSES = "runs_open", "runs_waiting", "runs_left_out", "calls_left_out", "states_left_out"


async def record_runs(
    spec: WorkflowSpec,
    inputs: Iterable[Json],
    options: EngineOptions,
    database: str,
    *,
    concurrency: int,
    may_start: Callable[[], bool] = lambda: True,
    done: Callable[[str], None] = lambda outcome: None,
) -> dict[str, int]:
    """Every input once, `concurrency` at a time, as long as `may_start`; `done` hears how each run ended.

    Returns what did not reach the store, by kind: runs (open or waiting when STORED_S had passed), calls, states,
    events; nothing of it is there if all did. Raises EngineError or InputError when the engine does not start.
    """
    async with _recording(options, database) as (server, host):
        pump = EventPump("record", _sender(host))
        graph = spec.build(LLM(server, pump.emit)).compile(name=spec.name)
        edges = [(edge.source, edge.target) for edge in graph.get_graph().edges]
        waiting, names = iter(inputs), set[str]()

        async def one(given: Json) -> str:
            # The same task has the same name, wherever it is recorded: runs of one instance resemble each other.
            run_id = f"{spec.name}-{hashlib.sha256(json.dumps(given, sort_keys=True).encode()).hexdigest()[:16]}"
            if run_id in names:
                return "left out: the same input ran before, and says nothing new at temperature 0"
            names.add(run_id)
            callback = LifecycleCallback(run_id, spec.name, spec.agents, edges, pump.emit)
            with running(RunContext(run_id, spec.name)):
                try:
                    config: Any = {"callbacks": [callback], "recursion_limit": spec.recursion_limit}
                    await graph.ainvoke(spec.checked(given), config)
                except Exception as error:  # one run's failure is that run's: the recording goes on
                    callback.finish("failed")
                    return f"failed: {error}"
            return "completed"

        async def work() -> None:
            for given in waiting:
                if not may_start():
                    return
                done(await one(given))

        async with asyncio.TaskGroup() as group:
            for _ in range(concurrency):
                group.create_task(work())
        await pump.close(STORED_S)
        for _ in range(10 * STORED_S):
            counts = await host.counts()
            if counts["recorded_runs_open"] + counts["recorded_runs_waiting"] == 0:
                break
            await asyncio.sleep(0.1)
        lost = {name: int(counts.get(f"recorded_{name}", 0)) for name in _LOSSES} | {"events": pump.dropped}
        return {name: number for name, number in lost.items() if number}


def _sender(host: ControllerHost) -> Callable[[Batch], Any]:
    async def send(batch: Batch) -> None:
        await host.events(batch)

    return send


@asynccontextmanager
async def _recording(options: EngineOptions, database: str) -> AsyncIterator[tuple[EngineServer, ControllerHost]]:
    loop, host = asyncio.get_running_loop(), ControllerHost(ControllerOptions(record_to=database))

    def heard(fact: Fact) -> None:
        if isinstance(fact, HiddenState):
            asyncio.run_coroutine_threadsafe(host.states([state_of(fact)], 0), loop)

    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # threads that spin slow down whoever shares their cores
    server = await asyncio.to_thread(EngineServer, options, replica="record", on_fact=heard, hidden_states=True)
    try:
        yield server, host
    finally:
        await asyncio.to_thread(server.shutdown)

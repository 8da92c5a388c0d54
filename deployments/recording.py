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
from pbkv_ray.errors import PbkvError
from pbkv_ray.graph.callback import LifecycleCallback
from pbkv_ray.graph.client import LLM
from pbkv_ray.graph.context import RunContext, running
from workflows.spec import WorkflowSpec

Json = dict[str, Any]
STORED_S = 60  # how long to wait for the last runs to reach the store


async def record_runs(
    spec: WorkflowSpec,
    inputs: Iterable[Json],
    options: EngineOptions,
    database: str,
    *,
    concurrency: int,
    may_start: Callable[[], bool] = lambda: True,
    done: Callable[[str], None] = lambda outcome: None,
) -> None:
    """Every input once, `concurrency` at a time, as long as `may_start`; `done` hears how each run ended.

    Raises EngineError or InputError when the engine does not start, PbkvError when the store does not take the runs.
    """
    async with _recording(options, database) as (server, host):
        pump = EventPump("record", _sender(host))
        graph = spec.build(LLM(server, pump.emit)).compile(name=spec.name)
        edges = [(edge.source, edge.target) for edge in graph.get_graph().edges]
        waiting = iter(inputs)
        completed = 0

        async def one(given: Json) -> str:
            # The same task has the same name, wherever it is recorded: runs of one instance resemble each other.
            run_id = f"{spec.name}-{hashlib.sha256(json.dumps(given, sort_keys=True).encode()).hexdigest()[:16]}"
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
            nonlocal completed
            for given in waiting:
                if not may_start():
                    return
                outcome = await one(given)
                completed += outcome == "completed"
                done(outcome)

        async with asyncio.TaskGroup() as group:
            for _ in range(concurrency):
                group.create_task(work())
        await pump.close()
        for _ in range(10 * STORED_S):
            if (await host.counts()).get("recorded_runs", 0) >= completed:
                return
            await asyncio.sleep(0.1)
        raise PbkvError(f"the store did not take {completed} runs within {STORED_S} s: {await host.counts()}")


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

"""The runner: LangGraph's Agent Protocol without HTTP, on a durable store (`deployments.service.RunService`).

    runner = Runner(store, checkpointer, registry, transport, emit, options)
    await runner.start()
    run = await runner.create_run(RunRequest(workflow="hover", input={...}))
    values = await runner.wait_run(None, run["run_id"])
    await runner.close()

Several runners may share one PostgreSQL store; each executes what it claims, and answers for all. A SQLite store is
for one machine.
"""

import asyncio
import contextlib
import json
import logging
import uuid
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import replace
from time import time
from typing import Any, Literal

from langgraph.checkpoint.base import BaseCheckpointSaver

from deployments.encoding import request_from_text, request_to_text
from deployments.execution import Durability, Execution
from deployments.graphs import Graphs, Registry
from deployments.kv import kv_json
from deployments.records import call_json, call_row, gone, queued_json, run_json
from deployments.requests import checked_request
from deployments.runner_metrics import RunnerMetrics
from deployments.scheduling import Scheduler
from deployments.service import Json, RunEvent, RunRequest
from deployments.supervision import Active
from deployments.threads import ThreadService
from deployments.watching import Wakeups, Watch
from pbkv_ray.config import RunnerOptions
from pbkv_ray.core.calls import Transport
from pbkv_ray.core.events import CallFinished, Event
from pbkv_ray.core.gate import Gate
from pbkv_ray.errors import ConflictError, NotFoundError, UnavailableError
from pbkv_ray.graph.client import LLM
from pbkv_ray.store import NewRun, RunRow, Store

logger = logging.getLogger(__name__)

PRUNE_BATCH = 200


class Runner:
    """Implements RunService. `emit` takes lifecycle events and must not block."""

    def __init__(
        self,
        store: Store,
        checkpointer: BaseCheckpointSaver[Any],
        registry: Registry,
        transport: Transport,
        emit: Callable[[Event], None],
        options: RunnerOptions | None = None,
        *,
        clock: Callable[[], float] = time,
        new_id: Callable[[], str] = lambda: str(uuid.uuid4()),
        gate: Gate | None = None,
    ) -> None:
        """`gate` holds new runs back while what the running ones hold does not fit the engines' caches."""
        self._gate = gate
        self._store = store
        self._emit = emit
        self._options = options or RunnerOptions()
        self._clock = clock
        self._new_id = new_id
        self._metrics = RunnerMetrics()
        wakeups = Wakeups()
        self._watch = Watch(store, wakeups, self._options.poll_s)
        self._background: set[asyncio.Task[None]] = set()
        llm = LLM(transport, self._observe, clock=clock)
        self._graphs = Graphs(registry, llm, checkpointer)
        self._threads = ThreadService(store, self._graphs, clock, new_id)
        # On SQLite a synchronous checkpoint costs more than most graph nodes; on PostgreSQL LangGraph's asynchronous
        # ones pile up when the server is slow (langgraph issue 7094).
        durability: Durability = "async" if store.is_sqlite else "sync"
        execution = Execution(self._graphs, store.runs.set_base, self._options.max_steps, durability)
        self._scheduler = Scheduler(
            store,
            self._graphs,
            execution,
            self._options,
            self._metrics,
            wakeups,
            self._observe,
            clock,
            owner=new_id(),
            gate=gate,
        )

    async def start(self) -> None:
        """Starts to execute runs, those that others left behind included."""
        await self._scheduler.start()
        self._in_background(self._prune_for_ever())

    async def close(self) -> None:
        """Gives the runs in flight back to the queue. The store and the checkpointer stay open."""
        await self._scheduler.stop()
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)

    @property
    def active(self) -> Mapping[str, Active]:
        """The runs that this runner executes now."""
        return self._scheduler.active

    def announce(self) -> None:
        """Tells of the runs in flight once more: the controller has restarted and knows of none."""
        self._scheduler.announce()

    def _observe(self, event: Event) -> None:
        if self._gate is not None and isinstance(event, CallFinished):
            self._gate.called(event)
        if isinstance(event, CallFinished) and (active := self.active.get(event.run_id)) is not None:
            if active.calls < self._options.max_calls_per_run:
                active.calls += 1
                active.log.record(call_row(event, active.run.attempt))
            else:
                self._metrics.calls_dropped.inc()
        if isinstance(event, CallFinished) and event.report is not None:
            event = replace(event, report=None)
        try:
            self._emit(event)
        except Exception:  # a lost event costs a forecast; a raised one would cost the run
            self._metrics.emit_errors.inc()
            logger.exception("a lifecycle event was not emitted")

    # --- threads ---

    async def create_thread(
        self, thread_id: str | None, metadata: Json, if_exists: Literal["raise", "do_nothing"]
    ) -> Json:
        return await self._threads.create(thread_id, metadata, if_exists)

    async def get_thread(self, thread_id: str) -> Json:
        return await self._threads.get(thread_id)

    async def update_thread(self, thread_id: str, metadata: Json) -> Json:
        return await self._threads.update(thread_id, metadata)

    async def search_threads(self, metadata: Json, status: str | None, limit: int, offset: int) -> list[Json]:
        return await self._threads.search(metadata, status, limit, offset)

    async def delete_thread(self, thread_id: str) -> None:
        await self._threads.delete(thread_id)

    async def thread_state(self, thread_id: str, checkpoint_id: str | None) -> Json:
        return await self._threads.state(thread_id, checkpoint_id)

    async def update_state(self, thread_id: str, values: Json | None, as_node: str | None) -> Json:
        return await self._threads.update_state(thread_id, values, as_node)

    async def thread_history(self, thread_id: str, limit: int, before: str | None) -> list[Json]:
        return await self._threads.history(thread_id, limit, before)

    # --- runs ---

    async def create_run(self, request: RunRequest) -> Json:
        request = checked_request(request, self._graphs, self._options.max_steps)
        new = NewRun(
            run_id=self._new_id(),
            thread_id=request.thread_id or self._new_id(),
            workflow=request.workflow,
            multitask=request.multitask,
            request=request_to_text(request),
            metadata=request.metadata,
            head_start_s=request.head_start_s,
        )
        try:
            admission = await self._store.runs.admit(
                new,
                max_pending=self._options.max_pending,
                now=self._clock(),
                make_thread=request.thread_id is None,
            )
        except (ConflictError, UnavailableError) as error:
            self._metrics.refused.labels("busy" if isinstance(error, ConflictError) else "full").inc()
            raise
        self._metrics.created.labels(request.workflow).inc()
        await self._scheduler.stop_here(admission.stopping)
        self._scheduler.look()
        return run_json(admission.run)

    async def list_runs(self, thread_id: str | None, status: str | None, limit: int, offset: int) -> list[Json]:
        rows = await self._store.runs.list(thread_id, status, limit, offset)
        if not rows and thread_id is not None:
            await self._store.threads.get(thread_id)
        return await self._shown(rows)

    async def get_run(self, thread_id: str | None, run_id: str) -> Json:
        return (await self._shown([await self._store.runs.get(run_id, thread_id)]))[0]

    async def _shown(self, rows: Sequence[RunRow]) -> list[Json]:
        """Runs that wait say where they stand, and why."""
        waiting = any(row.status == "pending" for row in rows)
        places = {run_id: place for place, run_id in enumerate(await self._store.runs.queue(), 1)} if waiting else {}
        return [queued_json(row, places.get(row.run_id), self._scheduler.held) for row in rows]

    async def cancel_run(self, thread_id: str | None, run_id: str, action: Literal["interrupt", "rollback"]) -> None:
        run = await self._store.runs.get(run_id, thread_id)
        if run.inflight:
            await self._scheduler.stop_run(run.run_id, action)

    async def delete_run(self, thread_id: str, run_id: str) -> None:
        """ConflictError while the run is in flight."""
        run = await self._store.runs.get(run_id, thread_id)
        await self._store.runs.delete(run.run_id)

    async def wait_run(self, thread_id: str | None, run_id: str) -> Json:
        await self._store.runs.get(run_id, thread_id)
        if (run := await self._watch.ended(run_id)) is None:
            return {"__error__": gone()}
        values: Json = json.loads(run.output or "null") or {}
        return values

    async def stream_run(self, thread_id: str | None, run_id: str, after: int) -> AsyncGenerator[RunEvent, None]:
        run = await self._store.runs.get(run_id, thread_id)
        ended = False
        try:
            async with contextlib.aclosing(self._watch.events(run_id, after)) as events:
                async for event in events:
                    yield event
            ended = True
        finally:
            if not ended and request_from_text(run.request).cancel_on_disconnect:
                self._in_background(self._stop_abandoned(run_id))

    async def _stop_abandoned(self, run_id: str) -> None:
        with contextlib.suppress(NotFoundError):
            await self.cancel_run(None, run_id, "interrupt")

    def _in_background(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def run_calls(self, run_id: str) -> list[Json]:
        """In the order in which they ended."""
        await self._store.runs.get(run_id)
        calls = await self._store.events.calls_of(run_id, self._options.max_calls_per_run)
        return [call_json(order, call) for order, call in enumerate(calls, 1)]

    async def run_kv(self, run_id: str) -> Json:
        await self._store.runs.get(run_id)
        return kv_json(run_id, await self._store.events.calls_of(run_id, self._options.max_calls_per_run, reports=True))

    # --- graphs ---

    async def graph_json(self, workflow: str) -> Json:
        return self._graphs.compiled(workflow).get_graph().to_json()

    async def graph_schemas(self, workflow: str) -> Json:
        return self._graphs.schemas(workflow)

    # --- operation ---

    async def prune(self, older_than_s: float) -> Json:
        """Deletes runs that ended so long ago, and threads that hold none and that nobody touched since."""
        before = self._clock() - older_than_s
        deleted_runs = deleted_threads = 0
        while ended := await self._store.runs.delete_ended(before, PRUNE_BATCH):
            deleted_runs += len(ended)
        while stale := await self._store.threads.stale(before, PRUNE_BATCH):
            for thread_id in stale:
                await self._graphs.forget(thread_id)
                await self._store.threads.delete(thread_id)
            deleted_threads += len(stale)
        return {"runs": deleted_runs, "threads": deleted_threads}

    async def _prune_for_ever(self) -> None:
        while True:
            await asyncio.sleep(self._options.prune_every_s)
            try:
                deleted = await self.prune(self._options.retention_s)
                logger.info("pruned %d runs and %d threads", deleted["runs"], deleted["threads"])
            except Exception:
                logger.exception("old runs could not be pruned; the next round tries again")

    async def tick(self) -> None:
        """One round of what `start` repeats: renew leases, obey stop requests, take over orphans."""
        await self._scheduler.tick()

    def metrics_text(self) -> str:
        """Prometheus text."""
        return self._metrics.text()

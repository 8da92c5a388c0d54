"""One run at this runner, from its claim to its end, which is stored exactly once.

Whatever happens ends here: the graph ends, fails or hangs, somebody cancels, the process shuts down, the database is
away, another runner took the run. What cannot be stored is left to the lease: it expires, and the next attempt finds
out whether it was bad luck.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Literal

from deployments.endings import failed, stopped, timed_out
from deployments.execution import Attempt, Execution
from deployments.graphs import SAVER_AWAY, Graphs
from deployments.recorder import Backoff, Recorder, RunLog
from deployments.runner_metrics import RunnerMetrics
from pbkv_ray.config import RunnerOptions
from pbkv_ray.core.events import Event, Outcome, RunEnded
from pbkv_ray.errors import EngineLostError, StoreError
from pbkv_ray.graph.callback import LifecycleCallback
from pbkv_ray.store import Ending, RunRow, Store

logger = logging.getLogger(__name__)

Reason = Literal["interrupt", "rollback", "timeout", "shutdown", "lost", "broken", "retry"]
# The database is away, or an engine died in the middle of an answer; the graph is not at fault: the run is tried again,
# from its checkpoint.
AWAY = (StoreError, EngineLostError, *SAVER_AWAY)


@dataclass(slots=True, eq=False)
class Active:
    """A run that this runner executes. The first reason to stop it counts."""

    run: RunRow
    log: RunLog
    reason: Reason | None = None
    detail: str = ""
    calls: int = 0  # recorded
    task: asyncio.Task[Ending] | None = None
    callback: LifecycleCallback | None = None
    told: RunEnded | None = None  # what the callback said of the end; whether it is one is known a little later
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    def stop(self, reason: Reason, detail: str = "") -> None:
        if self.reason is None:
            self.reason, self.detail = reason, detail
            if self.task is not None:
                self.task.cancel()

    @property
    def silent(self) -> bool:
        """The run goes on elsewhere, so its end here is none."""
        return self.reason in ("lost", "shutdown", "retry")


class Supervisor:
    def __init__(
        self,
        store: Store,
        graphs: Graphs,
        execution: Execution,
        recorder: Recorder,
        options: RunnerOptions,
        metrics: RunnerMetrics,
        emit: Callable[[Event], None],
        clock: Callable[[], float],
    ) -> None:
        self._store = store
        self._graphs = graphs
        self._execution = execution
        self._recorder = recorder
        self._options = options
        self._metrics = metrics
        self._emit = emit
        self._clock = clock

    async def see_through(self, active: Active) -> None:
        """Executes the run and stores its end. Never raises."""
        stop = active.run.stop_request
        try:
            if stop is not None:
                active.stop(stop)
            ending = None if stop is not None else await self._execute(active)
            self._tell_end(active)
            await self._recorder.close(active.log)
            await self._conclude(active, ending)
        except Exception:
            logger.exception("run %s could not be ended; its lease will run out", active.run.run_id)
        finally:
            active.log.close()

    # --- the graph ---

    async def _execute(self, active: Active) -> Ending | None:
        """The run's own ending; None when it was stopped, and `active.reason` says why."""
        run = active.run
        active.task = asyncio.create_task(self._attempt(active), name=f"pbkv-graph-{run.run_id}")
        await asyncio.wait({active.task}, timeout=self._options.run_timeout_s)
        if not active.task.done():
            active.stop("timeout")
        await self._let_go(active.task, run)
        if not active.task.done():
            return None
        if active.task.cancelled():
            if active.reason is not None:
                return None
            return failed("CancelledError", "a graph node cancelled itself", await self._state_of(run))
        error = active.task.exception()
        if error is None:
            return active.task.result()
        if active.reason is not None:
            return None
        logger.info("run %s failed", run.run_id, exc_info=error)
        return failed(type(error).__name__, str(error), await self._state_of(run))

    async def _attempt(self, active: Active) -> Ending:
        run = active.run
        callback = self._callback(active)
        outcome: Outcome = "cancelled"
        try:
            ending = await self._execution.run(Attempt.of(run), callback, active.log.publish)
            outcome = "interrupted" if ending.status == "interrupted" else "completed"
            return ending
        except AWAY as error:
            outcome = "failed"
            if active.reason is None and run.attempt < self._options.max_attempts:
                active.reason, active.detail = "retry", str(error)
            raise
        except Exception:
            outcome = "failed"
            raise
        finally:
            callback.finish(outcome)

    def _callback(self, active: Active) -> LifecycleCallback:
        run = active.run

        def emit(event: Event) -> None:
            if isinstance(event, RunEnded):
                active.told = event
            elif not active.silent:
                self._emit(event)

        agents = self._graphs.spec(run.workflow).agents
        edges = self._graphs.edges(run.workflow)
        active.callback = LifecycleCallback(
            run.run_id, run.workflow, agents, edges, emit, clock=self._clock, resumed=run.attempt > 1
        )
        return active.callback

    def _tell_end(self, active: Active) -> None:
        if active.callback is not None:
            active.callback.finish("cancelled")  # counts if the graph has not let go
        if active.told is not None and not active.silent:
            self._emit(active.told)

    async def _let_go(self, task: asyncio.Task[Ending], run: RunRow) -> None:
        """Waits for a stopped graph; a node that swallows the cancellation is asked again, three times in all."""
        for _ in range(3):
            if task.done():
                return
            task.cancel()
            await asyncio.wait({task}, timeout=self._options.stop_timeout_s / 3)
        if not task.done():
            self._metrics.stuck.inc()
            logger.error("run %s does not stop; its graph nodes go on until they return", run.run_id)

    # --- the end ---

    async def _conclude(self, active: Active, ending: Ending | None) -> None:
        run = active.run
        if active.reason == "lost":
            self._metrics.lost.inc()
            logger.warning("run %s is no longer ours: %s", run.run_id, active.detail)
        elif ending is None and active.reason in ("shutdown", "retry"):
            counted = active.reason == "retry"
            await self._persist(active, lambda: self._store.runs.release(run, self._clock(), counted=counted))
        elif ending is None and active.reason == "rollback":
            stored = await self._store.runs.get(run.run_id)  # the claimed row does not know the base yet
            await self._graphs.roll_back(run, stored.base_checkpoint)
            undone = stopped("rollback", await self._graphs.view(run.workflow, run.thread_id))
            if await self._persist(active, lambda: self._store.runs.discard(run, undone, self._clock())):
                self.report(run, undone)
        else:
            final = ending or await self._ending_of(active)
            if await self._persist(active, lambda: self._store.runs.end(run, final, self._clock())):
                self.report(run, final)
                await self._drop_stateless(run)

    async def _ending_of(self, active: Active) -> Ending:
        run = active.run
        if active.reason == "timeout":
            return timed_out(self._options.run_timeout_s, await self._state_of(run))
        if active.reason == "broken":
            message = f"the run's events cannot be stored: {active.detail}"
            return failed("StoreError", message, await self._state_of(run))
        return stopped("interrupt", await self._graphs.view(run.workflow, run.thread_id))

    async def _persist(self, active: Active, write: Callable[[], Awaitable[bool]]) -> bool:
        """Tries until the store answers. When another runner has the run by then, the store says so (False)."""
        backoff = Backoff()
        while True:
            try:
                done = await write()
            except StoreError as error:
                self._metrics.store_errors.inc()
                logger.warning("the end of run %s is not stored yet: %s", active.run.run_id, error)
                await backoff.wait()
                continue
            if not done:
                self._metrics.lost.inc()
            return done

    async def _drop_stateless(self, run: RunRow) -> None:
        """The conversation of a stateless run goes when its request says so; the record of the run stays."""
        request = Attempt.of(run).request
        if request.thread_id is None and not request.keep_thread:
            await self._graphs.forget(run.thread_id)
            await self._store.threads.delete(run.thread_id)

    async def _state_of(self, run: RunRow) -> str | None:
        """What the thread holds now; None when that cannot be said (a failing graph must still be able to end)."""
        try:
            return (await self._graphs.view(run.workflow, run.thread_id)).state
        except Exception:
            logger.warning("the state of thread %s cannot be read", run.thread_id, exc_info=True)
            return None

    async def end_unclaimed(self, run: RunRow, ending: Ending, *, discard: bool = False) -> bool:
        """Ends a run that nobody executes; False when somebody does by now."""
        end = self._store.runs.discard if discard else self._store.runs.end
        if done := await end(run, ending, self._clock()):
            self.report(run, ending)
        return done

    def report(self, run: RunRow, ending: Ending) -> None:
        self._metrics.ended.labels(run.workflow, ending.status).inc()
        if run.started_at is not None:
            self._metrics.seconds.labels(run.workflow).observe(max(0.0, self._clock() - run.started_at))

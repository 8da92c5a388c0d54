"""Which runs this runner executes: claimed when there is room, renewed while they live, stopped on request, taken
over from runners that fell silent.

Every run that is claimed here has one supervisor task that ends it exactly once, whatever happens: the graph ends,
fails or hangs, somebody cancels, the process shuts down, the store is away, another runner took the run. `tick` is
one round of what must be looked at again and again; `start` repeats it.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from deployments.encoding import to_json
from deployments.execution import Attempt, Execution
from deployments.graphs import Graphs
from deployments.recorder import RETRY_S, TRANSIENT, Recorder, RunLog, Wakeups
from deployments.runner_metrics import RunnerMetrics
from pbkv_ray.config import RunnerOptions
from pbkv_ray.core.events import Event, Outcome, RunEnded
from pbkv_ray.graph.callback import LifecycleCallback
from pbkv_ray.store import Ending, RunRow, Stop, Store, ThreadStatus

logger = logging.getLogger(__name__)

Reason = Literal["interrupt", "rollback", "timeout", "shutdown", "lost", "broken"]


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
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    def stop(self, reason: Reason, detail: str = "") -> None:
        if self.reason is None:
            self.reason, self.detail = reason, detail
            if self.task is not None:
                self.task.cancel()

    @property
    def silent(self) -> bool:
        """The run goes on elsewhere, so its end here is none."""
        return self.reason in ("lost", "shutdown")


class Scheduler:
    def __init__(
        self,
        store: Store,
        graphs: Graphs,
        execution: Execution,
        options: RunnerOptions,
        metrics: RunnerMetrics,
        wakeups: Wakeups,
        emit: Callable[[Event], None],
        clock: Callable[[], float],
        owner: str,
    ) -> None:
        self._store = store
        self._graphs = graphs
        self._execution = execution
        self._options = options
        self._metrics = metrics
        self._wakeups = wakeups
        self._emit = emit
        self._clock = clock
        self.owner = owner
        self.active: dict[str, Active] = {}
        self.recorder = Recorder(store, wakeups, metrics, clock, self._refused, options.max_event_bytes)
        self._room = asyncio.Event()
        self._stopping = False
        self._renewed_at = clock()
        self._loops: list[asyncio.Task[None]] = []
        self._supervisors: set[asyncio.Task[None]] = set()

    # --- the process ---

    async def start(self) -> None:
        self.recorder.start()
        self._loops = [
            asyncio.create_task(self._claim_for_ever(), name="pbkv-claims"),
            asyncio.create_task(self._tick_for_ever(), name="pbkv-ticks"),
        ]
        self.look()

    async def stop(self) -> None:
        """Stops all runs here and gives them back, so that the next runner goes on at once."""
        self._stopping = True
        for loop in self._loops:
            loop.cancel()
        await asyncio.gather(*self._loops, return_exceptions=True)
        for active in self.active.values():
            active.stop("shutdown")
        await asyncio.gather(*self._supervisors, return_exceptions=True)
        await self.recorder.stop()

    def look(self) -> None:
        """There may be a run to claim."""
        self._room.set()

    async def _claim_for_ever(self) -> None:
        while True:
            await self._room.wait()
            self._room.clear()
            try:
                await self.claim_all()
            except TRANSIENT as error:
                self._metrics.store_errors.inc()
                logger.warning("no run could be claimed: %s", error)

    async def _tick_for_ever(self) -> None:
        while True:
            try:
                await self.tick()
            except TRANSIENT as error:
                self._metrics.store_errors.inc()
                logger.warning("the store does not answer: %s", error)
            except Exception:
                logger.exception("a tick of the runner failed")
            await asyncio.sleep(self._options.poll_s)

    # --- one round ---

    async def claim_all(self) -> None:
        while not self._stopping and len(self.active) < self._options.max_running:
            now = self._clock()
            run = await self._store.runs.claim(self.owner, lease_until=now + self._options.lease_s, now=now)
            if run is None:
                return
            self._begin(run)

    async def tick(self) -> None:
        if self._clock() - self._renewed_at >= self._options.lease_s / 3:
            await self._renew()
        for run_id, stop in (await self._store.runs.stop_requests(self.owner)).items():
            if (active := self.active.get(run_id)) is not None:
                active.stop(stop)
        await self._take_over()
        counts = await self._store.runs.counts()
        self._metrics.pending.set(counts.get("pending", 0))
        self.look()

    async def _renew(self) -> None:
        """Only what we know of is renewed: a run claimed in our name that never began here must expire."""
        now = self._clock()
        known = list(self.active.values())
        try:
            renewed = await self._store.runs.renew(
                self.owner, [one.run.run_id for one in known], lease_until=now + self._options.lease_s, now=now
            )
        except Exception:
            if now - self._renewed_at > self._options.lease_s:
                for active in known:
                    active.stop("lost", "the store was away for longer than the lease")
            raise
        self._renewed_at = now
        for active in known:
            if active.ended.is_set() or active.log.closed:
                continue
            if renewed.get(active.run.run_id) != active.run.attempt:
                active.stop("lost", "another runner has it")
            elif active.callback is not None and not active.callback.ended:
                active.callback.start()  # the controller's lease on the run starts anew

    async def _take_over(self) -> None:
        now = self._clock()
        for run in await self._store.runs.expired(now):
            if run.run_id in self.active:
                continue  # ours, and about to be renewed or lost
            if run.attempt >= self._options.max_attempts and run.stop_request is None:
                await self._give_up(run)
            elif len(self.active) < self._options.max_running and not self._stopping:
                lease_until = now + self._options.lease_s
                if taken := await self._store.runs.take_over(run, self.owner, lease_until=lease_until, now=now):
                    self._metrics.taken_over.inc()
                    logger.warning("run %s was left by runner %s; attempt %d", run.run_id, run.owner, taken.attempt)
                    self._begin(taken)

    async def _give_up(self, run: RunRow) -> None:
        message = (
            f"the runner died or hung {run.attempt} times while it executed this run, which is the most that is "
            "tried; start it anew, or look into the runner's log for the reason"
        )
        ending = failed("RunnerLost", message, await self._state_of(run))
        if await self._store.runs.end(run, ending, self._clock()):
            self._metrics.given_up.inc()
            self._report(run, ending)
            self._emit(RunEnded(run.run_id, "failed", self._clock()))

    # --- one run ---

    def _begin(self, run: RunRow) -> Active:
        active = Active(run, self.recorder.open(run))
        self.active[run.run_id] = active
        self._metrics.running.set(len(self.active))
        supervisor = asyncio.create_task(self._supervise(active), name=f"pbkv-run-{run.run_id}")
        self._supervisors.add(supervisor)
        supervisor.add_done_callback(self._supervisors.discard)
        return active

    async def _supervise(self, active: Active) -> None:
        run = active.run
        try:
            if run.stop_request is not None:
                active.stop(run.stop_request)
                ending = None
            else:
                ending = await self._execute(active)
            await self._conclude(active, ending)
        except Exception:
            # Its lease runs out, and the next attempt finds out whether it was bad luck.
            logger.exception("run %s could not be ended", run.run_id)
        finally:
            active.log.close()
            self.active.pop(run.run_id, None)
            self._metrics.running.set(len(self.active))
            active.ended.set()
            self._wakeups.notify(run.run_id)
            self.look()

    async def _execute(self, active: Active) -> Ending | None:
        """The run's own ending; None when it was stopped, and `active.reason` says why."""
        run = active.run

        def emit(event: Event) -> None:
            if not active.silent:
                self._emit(event)

        async def attempt() -> Ending:
            spec = self._graphs.spec(run.workflow)
            callback = active.callback = LifecycleCallback(
                run.run_id, run.workflow, spec.agents, self._graphs.edges(run.workflow), emit, clock=self._clock
            )
            outcome: Outcome = "cancelled"
            try:
                ending = await self._execution.run(Attempt.of(run), callback, active.log.publish)
                outcome = "interrupted" if ending.status == "interrupted" else "completed"
                return ending
            except Exception:
                outcome = "failed"
                raise
            finally:
                callback.finish(outcome)

        active.task = asyncio.create_task(attempt(), name=f"pbkv-graph-{run.run_id}")
        if active.reason is not None:
            active.task.cancel()
        await asyncio.wait({active.task}, timeout=self._options.run_timeout_s)
        if not active.task.done():
            active.stop("timeout")
        await self._let_go(active)
        if active.reason is not None and (not active.task.done() or active.task.cancelled()):
            return None
        if active.task.cancelled():
            return failed("CancelledError", "a graph node cancelled itself", await self._state_of(run))
        if (error := active.task.exception()) is not None:
            if active.reason is not None:
                return None
            logger.info("run %s failed", run.run_id, exc_info=error)
            return failed(type(error).__name__, str(error), await self._state_of(run))
        return active.task.result()

    async def _let_go(self, active: Active) -> None:
        """Waits for the stopped graph; a node that swallows the cancellation is asked again, three times in all."""
        assert active.task is not None
        for _ in range(3):
            if active.task.done():
                return
            active.task.cancel()
            await asyncio.wait({active.task}, timeout=self._options.stop_timeout_s / 3)
        if not active.task.done():
            self._metrics.stuck.inc()
            logger.error("run %s does not stop; its graph nodes go on until they return", active.run.run_id)

    async def _conclude(self, active: Active, ending: Ending | None) -> None:
        run = active.run
        await self.recorder.close(active.log)
        if active.reason == "lost":
            self._metrics.lost.inc()
            logger.warning("run %s is no longer ours: %s", run.run_id, active.detail)
        elif ending is None and active.reason == "shutdown":
            await self._persist(active, lambda: self._store.runs.release(run, self._clock()))
        elif ending is None and active.reason == "rollback":
            await self._graphs.roll_back(run)
            undone = await self._stopped(run, "rollback")
            if await self._persist(active, lambda: self._store.runs.discard(run, undone, self._clock())):
                self._report(run, undone)
        else:
            final = ending or await self._stopped(run, active.reason or "interrupt", active.detail)
            if await self._persist(active, lambda: self._store.runs.end(run, final, self._clock())):
                self._report(run, final)

    async def _persist(self, active: Active, write: Callable[[], Awaitable[bool]]) -> bool:
        """Tries until the store answers. When the lease has run out by then, the store says so (False)."""
        while True:
            try:
                done = await write()
            except TRANSIENT as error:
                self._metrics.store_errors.inc()
                logger.warning("the end of run %s is not stored yet: %s", active.run.run_id, error)
                await asyncio.sleep(RETRY_S)
                continue
            if not done:
                self._metrics.lost.inc()
            return done

    async def _stopped(self, run: RunRow, reason: str, detail: str = "") -> Ending:
        view = await self._graphs.view(run.workflow, run.thread_id)
        if reason == "timeout":
            message = f"the run took longer than {self._options.run_timeout_s:g} s, the most that a run may take"
            return closing("timeout", "error", "RunTimeout", message, view.state)
        if reason == "broken":
            return closing("error", "error", "StoreError", f"the run's events cannot be stored: {detail}", view.state)
        name, message = STOPS[reason]
        return closing("interrupted", view.status, name, message, view.state)

    async def _state_of(self, run: RunRow) -> str | None:
        """What the thread holds now; None when that cannot be said (a failing graph must still be able to end)."""
        try:
            return (await self._graphs.view(run.workflow, run.thread_id)).state
        except Exception:
            logger.warning("the state of thread %s cannot be read", run.thread_id, exc_info=True)
            return None

    def _report(self, run: RunRow, ending: Ending) -> None:
        self._metrics.ended.labels(run.workflow, ending.status).inc()
        if run.started_at is not None:
            self._metrics.seconds.labels(run.workflow).observe(max(0.0, self._clock() - run.started_at))

    def _refused(self, run_id: str, error: Exception | None) -> None:
        if (active := self.active.get(run_id)) is not None:
            active.stop("lost" if error is None else "broken", str(error or "another runner has it"))

    # --- requests ---

    async def stop_run(self, run_id: str, stop: Stop) -> None:
        """Returns when the run has ended, here or at the runner that executes it."""
        await self._store.runs.ask_stop(run_id, stop, self._clock())
        with self._wakeups.subscribed(run_id) as news:
            while (run := await self._store.runs.find(run_id)) is not None and run.inflight:
                if (active := self.active.get(run_id)) is not None:
                    active.stop(stop)
                    await active.ended.wait()
                elif run.status == "pending":
                    await self._stop_waiting(run, stop)
                else:
                    news.clear()
                    await wait_for_news(news, self._options.poll_s)

    async def stop_here(self, runs: Sequence[RunRow]) -> None:
        """Starts to stop those of the runs that are ours or wait; their requests to stop are stored already."""
        for run in runs:
            if run.stop_request is None:
                continue
            if (active := self.active.get(run.run_id)) is not None:
                active.stop(run.stop_request)
            elif run.status == "pending":
                await self._stop_waiting(run, run.stop_request)

    async def _stop_waiting(self, run: RunRow, stop: Stop) -> None:
        """A run that never started ends at once; one that was given back is claimed first, for its checkpoints."""
        if run.started_at is None:
            ending = await self._stopped(run, stop)
            end = self._store.runs.end if stop == "interrupt" else self._store.runs.discard
            if await end(run, ending, self._clock()):
                self._report(run, ending)
                self._wakeups.notify(run.run_id)
                self.look()
            return
        now = self._clock()
        taken = await self._store.runs.claim_this(
            run.run_id, self.owner, lease_until=now + self._options.lease_s, now=now
        )
        if taken is not None:
            await self._begin(taken).ended.wait()


STOPS = {
    "interrupt": ("UserInterrupt", "the run was cancelled"),
    "rollback": ("UserRollback", "the run was cancelled and rolled back"),
}


def closing(
    status: Literal["error", "timeout", "interrupted"],
    thread_status: ThreadStatus,
    error: str,
    message: str,
    state: str | None,
) -> Ending:
    said = to_json({"error": error, "message": message})
    return Ending(
        status,
        thread_status,
        (("error", said),),
        output=to_json({"__error__": {"error": error, "message": message}}),
        error=error,
        message=message,
        state=state,
    )


def failed(error: str, message: str, state: str | None) -> Ending:
    return closing("error", "error", error, message, state)


async def wait_for_news(news: asyncio.Event, timeout_s: float) -> None:
    """Returns on news or after `timeout_s`, whichever is first."""
    try:
        async with asyncio.timeout(timeout_s):
            await news.wait()
    except TimeoutError:
        return

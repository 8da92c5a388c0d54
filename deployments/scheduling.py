"""Which runs this runner executes: claimed when there is room, renewed while they live, stopped on request, taken
over from runners that fell silent.

`tick` is one round of what must be looked at again and again; `start` repeats it. Every run that begins here has a
supervisor task (`supervision.py`) that ends it.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence

from deployments.endings import failed, stopped
from deployments.execution import Execution
from deployments.graphs import Graphs
from deployments.recorder import Recorder
from deployments.runner_metrics import RunnerMetrics
from deployments.supervision import Active, Supervisor
from deployments.watching import Wakeups, wait_for_news
from pbkv_ray.config import RunnerOptions
from pbkv_ray.core.events import Event, RunEnded
from pbkv_ray.core.gate import Gate
from pbkv_ray.errors import StoreError
from pbkv_ray.store import RunRow, Stop, Store
from pbkv_ray.store.runs import CANDIDATES

logger = logging.getLogger(__name__)


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
        gate: Gate | None = None,
    ) -> None:
        """`gate` may hold new runs back; what it says is in `held`."""
        self._store = store
        self._graphs = graphs
        self._options = options
        self._metrics = metrics
        self._wakeups = wakeups
        self._emit = emit
        self._clock = clock
        self._owner = owner
        self._gate = gate
        self.held: str | None = None  # why the next run must wait although there is a place for it
        self.active: dict[str, Active] = {}
        self._recorder = Recorder(store, wakeups, metrics, clock, self._refused, options.max_event_bytes)
        self._supervisor = Supervisor(store, graphs, execution, self._recorder, options, metrics, emit, clock)
        self._room = asyncio.Event()
        self._stopping = False
        self._renewed_at = clock()
        self._loops: list[asyncio.Task[None]] = []
        self._runs: set[asyncio.Task[None]] = set()

    # --- the process ---

    async def start(self) -> None:
        self._recorder.start()
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
        for active in list(self.active.values()):
            active.stop("shutdown")
        await asyncio.gather(*self._runs, return_exceptions=True)
        await self._recorder.stop()

    def look(self) -> None:
        """There may be a run to claim."""
        self._room.set()

    async def _claim_for_ever(self) -> None:
        while True:
            await self._room.wait()
            self._room.clear()
            try:
                await self.claim_all()
            except StoreError as error:
                self._metrics.store_errors.inc()
                logger.warning("no run could be claimed: %s", error)
            except Exception:
                logger.exception("claiming failed; the next tick tries again")

    async def _tick_for_ever(self) -> None:
        while True:
            try:
                await self.tick()
            except StoreError as error:
                self._metrics.store_errors.inc()
                logger.warning("the store does not answer: %s", error)
            except Exception:
                logger.exception("a tick of the runner failed")
            await asyncio.sleep(self._options.poll_s)

    # --- one round ---

    async def claim_all(self) -> None:
        while self._may_begin():
            found = await self._store.runs.claimable()
            for run_id in found:
                if not self._may_begin():
                    return
                if (run := await self._claim(run_id)) is not None:
                    self._begin(run)
            if len(found) < CANDIDATES:
                return

    def _may_begin(self) -> bool:
        if self._stopping or len(self.active) >= self._options.max_running:
            self.held = None
            return False
        self.held = None if self._gate is None else self._gate.held(len(self.active))
        if self._gate is not None:
            self._metrics.gate(self._gate, self.held is not None)
        return self.held is None

    async def _claim(self, run_id: str) -> RunRow | None:
        now = self._clock()
        return await self._store.runs.claim(run_id, self._owner, lease_until=now + self._options.lease_s, now=now)

    async def tick(self) -> None:
        if self._clock() - self._renewed_at >= self._options.lease_s / 3:
            await self._renew()
        for run_id, stop in (await self._store.runs.stop_requests(self._owner)).items():
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
                self._owner, [one.run.run_id for one in known], lease_until=now + self._options.lease_s, now=now
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

    def announce(self) -> None:
        for active in self.active.values():
            if active.callback is not None and not active.callback.ended:
                active.callback.start()

    async def _take_over(self) -> None:
        now = self._clock()
        for run in await self._store.runs.expired(now):
            if run.run_id in self.active:
                continue  # ours, and about to be renewed or lost
            # A stop request is tried for longer than a run, but not for ever either.
            if run.attempt >= self._options.max_attempts * (1 if run.stop_request is None else 2):
                await self._give_up(run)
            elif len(self.active) < self._options.max_running and not self._stopping:
                lease_until = now + self._options.lease_s
                if taken := await self._store.runs.take_over(run, self._owner, lease_until=lease_until, now=now):
                    self._metrics.taken_over.inc()
                    logger.warning("run %s was left by runner %s; attempt %d", run.run_id, run.owner, taken.attempt)
                    self._begin(taken)

    async def _give_up(self, run: RunRow) -> None:
        message = (
            f"{run.attempt} runners died or hung while they executed this run, which is the most that is tried; "
            "start it anew, or look into the runners' logs for the reason"
        )
        if await self._supervisor.end_unclaimed(run, failed("RunnerLost", message, None)):
            self._metrics.given_up.inc()
            self._emit(RunEnded(run.run_id, "failed", self._clock()))
            self._wakeups.notify_end(run.run_id)

    def _begin(self, run: RunRow) -> Active:
        active = Active(run, self._recorder.open(run))
        self.active[run.run_id] = active
        self._metrics.running.set(len(self.active))
        task = asyncio.create_task(self._see_through(active), name=f"pbkv-run-{run.run_id}")
        self._runs.add(task)
        task.add_done_callback(self._runs.discard)
        return active

    async def _see_through(self, active: Active) -> None:
        try:
            await self._supervisor.see_through(active)
        finally:
            del self.active[active.run.run_id]
            if self._gate is not None:
                self._gate.ended(active.run.run_id)
            self._metrics.running.set(len(self.active))
            active.ended.set()
            self._wakeups.notify_end(active.run.run_id)
            self.look()

    def _refused(self, run_id: str, error: Exception | None) -> None:
        if (active := self.active.get(run_id)) is not None:
            active.stop("lost" if error is None else "broken", str(error or "another runner has it"))

    # --- requests ---

    async def stop_run(self, run_id: str, stop: Stop) -> None:
        """Returns when the run has ended, here or at the runner that executes it."""
        await self._store.runs.ask_stop(run_id, stop, self._clock())
        with self._wakeups.subscribed_to_end(run_id) as news:
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
        """Stops those of the runs that are ours or wait; their requests to stop are stored already."""
        for run in runs:
            if run.stop_request is None:
                continue
            if (active := self.active.get(run.run_id)) is not None:
                active.stop(run.stop_request)
            elif run.status == "pending" and run.started_at is None:
                await self._stop_waiting(run, run.stop_request)

    async def _stop_waiting(self, run: RunRow, stop: Stop) -> None:
        """A run that never started ends at once; one that was given back is claimed first, for its checkpoints."""
        if run.started_at is None:
            ending = stopped(stop, await self._graphs.view(run.workflow, run.thread_id))
            if await self._supervisor.end_unclaimed(run, ending, discard=stop == "rollback"):
                self._wakeups.notify_end(run.run_id)
                self.look()
            return
        if (taken := await self._claim(run.run_id)) is not None:
            await self._begin(taken).ended.wait()

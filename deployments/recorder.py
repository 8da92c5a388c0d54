"""Writes what runs say (events, calls) to the store in group commits, and wakes whoever waits for it.

A reader sees an event only after it is stored: a stream that breaks can then go on, at this runner or another, from
the number it saw last. While one commit is under way the next batch gathers, so the batches grow with the load and
no timer is needed.
"""

import asyncio
import logging
from collections.abc import Callable

from deployments.runner_metrics import RunnerMetrics
from deployments.watching import Wakeups
from pbkv_ray.errors import StoreError
from pbkv_ray.store import Batch, CallRow, RunRow, Store

logger = logging.getLogger(__name__)

MAX_WAITING = 256  # events of one run that wait for the store; beyond it the graph waits
RETRY_S, MAX_RETRY_S = 0.1, 5.0


class Backoff:
    """Waits between tries, each time twice as long, up to a bound."""

    def __init__(self) -> None:
        self._next_s = RETRY_S

    async def wait(self) -> None:
        await asyncio.sleep(self._next_s)
        self._next_s = min(2 * self._next_s, MAX_RETRY_S)


class RunLog:
    """The writing end of one attempt of a run."""

    def __init__(self, run: RunRow, work: asyncio.Event, metrics: RunnerMetrics, max_event_bytes: int) -> None:
        self.run = run
        self.closed = False  # lost or broken: nothing more is written
        self.flushed = asyncio.Event()
        self.flushed.set()
        self.events: list[tuple[str, str]] = []
        self.calls: list[CallRow] = []
        self._work = work
        self._metrics = metrics
        self._max_event_bytes = max_event_bytes

    async def publish(self, event: str, data: str) -> None:
        """Queues an event; waits while the store is behind."""
        if len(data) > self._max_event_bytes:
            self._metrics.events_dropped.labels("too large").inc()
            return
        if self.closed:
            return
        self._queue()
        self.events.append((event, data))
        while len(self.events) >= MAX_WAITING and not self.closed:
            await self.flushed.wait()

    def record(self, call: CallRow) -> None:
        if not self.closed:
            self._queue()
            self.calls.append(call)

    def _queue(self) -> None:
        self.flushed.clear()
        self._work.set()

    def take(self) -> Batch:
        assert self.run.owner is not None
        batch = Batch(self.run.run_id, self.run.owner, self.run.attempt, self.events, self.calls)
        self.events, self.calls = [], []
        return batch

    def put_back(self, batch: Batch) -> None:
        self.events = batch.events + self.events
        self.calls = batch.calls + self.calls

    def close(self) -> None:
        self.closed = True
        self.events, self.calls = [], []
        self.flushed.set()


class Recorder:
    """`on_lost(run_id, error)` hears of runs whose events the store refused: not ours now, or broken."""

    def __init__(
        self,
        store: Store,
        wakeups: Wakeups,
        metrics: RunnerMetrics,
        clock: Callable[[], float],
        on_lost: Callable[[str, Exception | None], None],
        max_event_bytes: int,
    ) -> None:
        self._store = store
        self._wakeups = wakeups
        self._metrics = metrics
        self._clock = clock
        self._on_lost = on_lost
        self._max_event_bytes = max_event_bytes
        self._work = asyncio.Event()
        self._logs: dict[str, RunLog] = {}
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._write_for_ever(), name="pbkv-recorder")

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def open(self, run: RunRow) -> RunLog:
        log = RunLog(run, self._work, self._metrics, self._max_event_bytes)
        self._logs[run.run_id] = log
        return log

    async def close(self, log: RunLog) -> None:
        """Returns when all of the log is stored, or refused."""
        await log.flushed.wait()
        log.close()
        if self._logs.get(log.run.run_id) is log:
            del self._logs[log.run.run_id]

    async def _write_for_ever(self) -> None:
        backoff = Backoff()
        while True:
            await self._work.wait()
            self._work.clear()
            logs = [log for log in self._logs.values() if not log.flushed.is_set()]
            batches = [log.take() for log in logs]
            try:
                lost, dropped = await self._store.events.append(batches, self._clock())
            except StoreError as error:
                self._metrics.store_errors.inc()
                logger.warning("the store did not take %d batches, trying again: %s", len(batches), error)
                for log, batch in zip(logs, batches, strict=True):
                    log.put_back(batch)
                self._work.set()
                await backoff.wait()
                continue
            except Exception as error:
                await self._find_broken(logs, batches, error)
                continue
            backoff = Backoff()
            self._metrics.events.inc(sum(len(b.events) for b in batches if b.run_id not in lost))
            self._metrics.events_dropped.labels("run is full").inc(dropped)
            for log in logs:
                self._settle(log, log.run.run_id in lost, None)

    async def _find_broken(self, logs: list[RunLog], batches: list[Batch], error: Exception) -> None:
        """One batch that the store cannot take must not stop the others: each goes alone."""
        for log, batch in zip(logs, batches, strict=True):
            if len(batches) == 1:
                logger.error("the store refuses the events of run %s", log.run.run_id, exc_info=error)
                self._settle(log, True, error)
                continue
            try:
                lost, _ = await self._store.events.append([batch], self._clock())
                self._settle(log, bool(lost), None)
            except Exception as own:
                logger.error("the store refuses the events of run %s", log.run.run_id, exc_info=own)
                self._settle(log, True, own)

    def _settle(self, log: RunLog, refused: bool, error: Exception | None) -> None:
        if refused:
            log.close()
            self._on_lost(log.run.run_id, error)
        elif not log.events and not log.calls:
            log.flushed.set()
        else:
            self._work.set()
        self._wakeups.notify(log.run.run_id)

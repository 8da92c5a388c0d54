"""Takes events to the controller: in order, in batches, one batch in flight, bounded, never in the way."""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from itertools import islice

from pbkv_ray.core.events import Batch, Event, RunEnded

Send = Callable[[Batch], Awaitable[None]]
log = logging.getLogger(__name__)


class EventPump:
    """`emit` may be called from the loop's thread only; it queues and returns.

    A batch that could not be sent is sent again under the same sequence, so the controller drops what it already
    had. Beyond `capacity` the oldest events go and are counted in the next batch; endings go last, since a lost one
    keeps a run's cache alive for as long as its lease.
    """

    def __init__(
        self,
        source: str,
        send: Send,
        *,
        capacity: int = 20_000,
        batch: int = 4_096,
        retry_s: float = 0.25,
        linger_s: float = 0.005,
    ) -> None:
        self._source = source
        self._send = send
        self._capacity = capacity
        self._batch = batch
        self._retry_s = retry_s
        self._linger_s = linger_s
        self._queue: deque[Event] = deque()
        self._endings = 0  # among the queued
        self._sequence = 0  # of the first queued event
        self._task: asyncio.Task[None] | None = None
        self._closed = False
        self.sent = 0
        self.dropped = 0
        self.failures = 0

    def emit(self, event: Event) -> None:
        if len(self._queue) >= self._capacity:
            self._make_room()
        self._put(event)
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._drain())

    def _make_room(self) -> None:
        """Endings step back behind everything else, where they may stand: nothing of their runs comes after them."""
        kept = self._endings <= self._capacity // 2
        oldest = self._take()
        while kept and isinstance(oldest, RunEnded):
            self._put(oldest)
            oldest = self._take()
        self.dropped += 1

    def _put(self, event: Event) -> None:
        self._queue.append(event)
        self._endings += isinstance(event, RunEnded)

    def _take(self) -> Event:
        self._sequence += 1
        event = self._queue.popleft()
        self._endings -= isinstance(event, RunEnded)
        return event

    async def close(self, timeout_s: float = 2.0) -> None:
        """Send what is queued, for `timeout_s` at most; the rest counts as dropped."""
        self._closed = True
        if self._task is not None and not self._task.done():
            await asyncio.wait([self._task], timeout=timeout_s)
            self._task.cancel()
        self.dropped += len(self._queue)
        self._queue.clear()
        self._endings = 0

    async def _drain(self) -> None:
        await asyncio.sleep(self._linger_s)  # lets the events of one moment share a batch
        while self._queue:
            first = self._sequence
            batch = Batch(self._source, first, tuple(islice(self._queue, self._batch)), self.dropped)
            try:
                await self._send(batch)
            except Exception as error:
                self.failures += 1
                if self.failures == 1 or self.failures % 100 == 0:
                    log.warning("events of %s wait for the controller: %r", self._source, error)
                await asyncio.sleep(self._retry_s)
                continue
            done = max(0, first + len(batch.events) - self._sequence)  # some may have been dropped meanwhile
            for _ in range(min(done, len(self._queue))):
                self._take()
            self.sent += len(batch.events)

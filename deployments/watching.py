"""Following a run, wherever it is executed: woken by this process's news, else by looking again."""

import asyncio
from collections.abc import AsyncGenerator, Iterator
from contextlib import AbstractContextManager, contextmanager

from deployments.encoding import to_json
from deployments.records import gone
from deployments.service import RunEvent
from pbkv_ray.store import RunRow, Store


class Wakeups:
    """Wakes, in this process, those who wait for news of a run, or only for its end. Others poll the store."""

    def __init__(self) -> None:
        self._waiting: dict[tuple[str, bool], set[asyncio.Event]] = {}

    def notify(self, run_id: str) -> None:
        self._wake(run_id, False)

    def notify_end(self, run_id: str) -> None:
        self._wake(run_id, False)
        self._wake(run_id, True)

    def subscribed(self, run_id: str) -> AbstractContextManager[asyncio.Event]:
        return self._subscribed(run_id, False)

    def subscribed_to_end(self, run_id: str) -> AbstractContextManager[asyncio.Event]:
        return self._subscribed(run_id, True)

    def _wake(self, run_id: str, end: bool) -> None:
        for event in self._waiting.get((run_id, end), ()):
            event.set()

    @contextmanager
    def _subscribed(self, run_id: str, end: bool) -> Iterator[asyncio.Event]:
        event = asyncio.Event()
        waiting = self._waiting.setdefault((run_id, end), set())
        waiting.add(event)
        try:
            yield event
        finally:
            waiting.discard(event)
            if not waiting and self._waiting.get((run_id, end)) is waiting:
                del self._waiting[run_id, end]


class Watch:
    def __init__(self, store: Store, wakeups: Wakeups, poll_s: float) -> None:
        self._store = store
        self._wakeups = wakeups
        self._poll_s = poll_s

    async def ended(self, run_id: str) -> RunRow | None:
        """The run once it has ended; None when it is gone."""
        with self._wakeups.subscribed_to_end(run_id) as news:
            while (run := await self._store.runs.find(run_id)) is not None and run.inflight:
                await wait_for_news(news, self._poll_s)
                news.clear()
        return run

    async def events(self, run_id: str, after: int) -> AsyncGenerator[RunEvent, None]:
        """The events with seq > after, until the run has ended. A run that is gone ends with an error of its own."""
        with self._wakeups.subscribed(run_id) as news:
            while True:
                news.clear()
                run = await self._store.runs.find(run_id)  # before its events, so that none is missed at the end
                events = await self._store.events.after(run_id, after)
                for event in events:
                    after = event.seq
                    yield RunEvent(event.seq, event.event, event.data)
                if run is None:
                    yield RunEvent(after + 1, "error", to_json(gone()))
                    return
                if not events:
                    if not run.inflight:
                        return
                    await wait_for_news(news, self._poll_s)


async def wait_for_news(news: asyncio.Event, timeout_s: float) -> None:
    """Returns on news or after `timeout_s`, whichever is first."""
    try:
        async with asyncio.timeout(timeout_s):
            await news.wait()
    except TimeoutError:
        return

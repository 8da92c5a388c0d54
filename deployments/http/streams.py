"""Long answers: a run's events as SSE, a run's end with heartbeats, and what happens when the client leaves."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from typing import Any, Generic, TypeVar

from fastapi import Request
from sse_starlette import EventSourceResponse, ServerSentEvent
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from deployments.http.context import Gateway, Tasks
from deployments.http.errors import cause_of
from deployments.service import Json, RunService

T = TypeVar("T")
_END = object()
_ALWAYS = frozenset(("metadata", "error", "end"))


class Pump(Generic[T]):
    """Reads `source` in a task of its own, one item ahead.

    A web framework cancels a stream's generator again and again until it has gone, so nothing can be awaited
    while it goes. Here `close` returns at once; the source is then closed in its own time, and `left` is awaited
    if the source had not ended.
    """

    def __init__(
        self, source: AsyncIterator[T], tasks: Tasks, what: str, left: Callable[[], Awaitable[Any]] | None = None
    ) -> None:
        self._source = source
        self._tasks = tasks
        self._what = what
        self._left = left
        self._queue: asyncio.Queue[Any] = asyncio.Queue(maxsize=1)
        self._ended = False
        self._closed = False
        self._task = tasks.spawn(self._read(), what)

    async def __aiter__(self) -> AsyncIterator[T]:
        while (item := await self._queue.get()) is not _END:
            if isinstance(item, BaseException):
                raise item
            yield item

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._task.cancel()
            self._tasks.spawn(self._clean(), f"end of {self._what}")

    async def _read(self) -> None:
        last: object = _END
        try:
            async for item in self._source:
                await self._queue.put(item)
        except Exception as error:
            last = error
        self._ended = True
        await self._queue.put(last)

    async def _clean(self) -> None:
        await asyncio.wait([self._task])
        close = getattr(self._source, "aclose", None)
        if close is not None:
            await close()
        if self._left is not None and not self._ended:
            await self._left()


class EventStream(EventSourceResponse):
    """Closes its pump however it ends, even if the client had gone before the first event."""

    def __init__(self, pump: Pump[Any], content: AsyncIterator[ServerSentEvent], **options: Any) -> None:
        super().__init__(content, sep="\n", **options)
        self._pump = pump

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._pump.close()


class ByteStream(StreamingResponse):
    """Bytes as a pump gives them; closes it however it ends."""

    def __init__(self, pump: Pump[bytes], **options: Any) -> None:
        super().__init__(pump, **options)
        self._pump = pump

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._pump.close()


def _failure(error: Exception) -> Json:
    found = cause_of(error)
    return {"error": type(found).__name__, "message": str(found)}


def sse(
    gateway: Gateway,
    runs: RunService,
    run: Json,
    *,
    after: int = 0,
    modes: frozenset[str] = frozenset(),
    cancel: bool = False,
    headers: dict[str, str] | None = None,
) -> EventStream:
    """The run's events from `after` on, each with its number as the SSE id. `modes` empty means all of them.

    With `cancel` a client that leaves before the end stops the run.
    """
    thread_id, run_id = run["thread_id"], run["run_id"]

    async def stop() -> None:
        if cancel:
            await runs.cancel_run(thread_id, run_id, "interrupt")

    pump = Pump(runs.stream_run(thread_id, run_id, after), gateway.tasks, f"stream of run {run_id}", stop)

    async def events() -> AsyncIterator[ServerSentEvent]:
        try:
            async for event in pump:
                kind = event.event.partition("|")[0].partition("/")[0]
                if not modes or kind in modes or kind in _ALWAYS:
                    yield ServerSentEvent(data=event.data, event=event.event, id=str(event.seq), sep="\n")
        except Exception as error:  # the status is sent; what is left is to say it in the stream
            yield ServerSentEvent(data=json.dumps(_failure(error)), event="error", sep="\n")

    return EventStream(pump, events(), headers=headers, ping=gateway.options.heartbeat_s)


def awaited(
    gateway: Gateway, runs: RunService, run: Json, *, cancel: bool = False, headers: dict[str, str] | None = None
) -> ByteStream:
    """The run's final values as JSON, blanks before them as heartbeats: a run may outlast any read timeout."""
    thread_id, run_id = run["thread_id"], run["run_id"]

    async def stop() -> None:
        if cancel:
            await runs.cancel_run(thread_id, run_id, "interrupt")

    async def chunks() -> AsyncIterator[bytes]:
        task = asyncio.ensure_future(runs.wait_run(thread_id, run_id))
        try:
            while not (await asyncio.wait([task], timeout=gateway.options.heartbeat_s))[0]:
                yield b"\n"
            try:
                values: Any = task.result()
            except Exception as error:
                values = {"__error__": _failure(error)}
            yield json.dumps(values).encode()
        finally:
            if not task.done():
                task.cancel()

    pump = Pump(chunks(), gateway.tasks, f"wait for run {run_id}", stop)
    return ByteStream(pump, media_type="application/json", headers=headers)


async def unless_gone(request: Request, work: Awaitable[T]) -> T | None:
    """What `work` gives, or None when the client left first; the work is then cancelled.

    The body must have been read: what is received after it is the client's leaving.
    """

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(gone())
    try:
        await asyncio.wait([task, watch], return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        watch.cancel()
        if not task.done():
            task.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await task

"""What the live page shows: one snapshot a second from the controller, however many watch."""

import asyncio
import json
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from sse_starlette import EventSourceResponse, ServerSentEvent
from starlette.responses import Response

from deployments.http.context import Gateway
from deployments.http.models import Json
from pbkv_ray.errors import PbkvError, UnavailableError

Source = Callable[[int], Awaitable[Json]]

_EMPTY: Json = {
    "at_s": 0.0,
    "runs": {"active": 0, "states": {}, "workflows": {}, "rows": []},
    "replicas": [],
    "rates": None,
}
_MAX_VIEWS = 64  # answers kept of one snapshot

State = Literal["calling", "thinking", "tool", "human", "idle"]


class Fresh:
    """What `ask` gave, at most `every_s` old; one question at a time, whoever waits for it. When it fails, the last
    answer goes on, with `stale` saying why."""

    def __init__(self, ask: Callable[[], Awaitable[Json]], every_s: float, clock: Callable[[], float]) -> None:
        self._ask = ask
        self._every_s = every_s
        self._clock = clock
        self._asked_s = float("-inf")
        self._asking: asyncio.Task[None] | None = None
        self.last: Json = _EMPTY

    async def get(self) -> Json:
        if self._asking is None and self._clock() - self._asked_s >= self._every_s:
            self._asked_s = self._clock()
            self._asking = asyncio.get_running_loop().create_task(self._renew())
        if self._asking is not None:
            await asyncio.shield(self._asking)  # others wait for it, too
        return self.last

    async def _renew(self) -> None:
        try:
            self.last = await self._ask()
        except PbkvError as error:
            self.last = {**self.last, "stale": str(error)}
        finally:
            self._asking = None


class Live:
    """Snapshots as each viewer may see them: of all runs without keys, else of the tenant's own."""

    def __init__(self, gateway: Gateway, source: Source, clock: Callable[[], float] = time.monotonic) -> None:
        self._gateway = gateway
        self._clock = clock
        options = gateway.options
        self._snapshots = Fresh(lambda: source(options.live_rows), options.live_every_s, clock)
        self._stored: dict[str, Fresh] = {}  # tenant -> its runs in the store; as many as there are keys
        self._views: dict[tuple[Any, ...], str] = {}
        self._viewed: Json | None = None  # the snapshot that they show
        self.viewers = 0

    async def view(self, request: Request, offset: int, find: str, state: str | None) -> str:
        """JSON. Equal questions of one second share an answer."""
        tenant = self._gateway.tenant(request)
        label = "" if tenant is None else tenant.label
        snapshot, stored = await asyncio.gather(self._snapshots.get(), self._waiting(label, request).get())
        if len(self._views) >= _MAX_VIEWS or self._viewed is not snapshot:
            self._views.clear()
            self._viewed = snapshot
        key = label, offset, find, state
        if (text := self._views.get(key)) is None:
            if tenant is not None:
                snapshot = of_tenant(snapshot, label, {run["run_id"] for run in stored.get("running", ())})
            page = page_of(snapshot, offset, self._gateway.options.live_page, find, state)
            queue = {"pending": stored.get("pending", []), "more": stored.get("more", False)}
            text = self._views[key] = json.dumps({**page, "queue": queue}, separators=(",", ":"))
        return text

    def _waiting(self, label: str, request: Request) -> Fresh:
        """The runs that wait for a runner; with keys also which of those in flight are the tenant's."""
        if label not in self._stored:
            runs, options = self._gateway.runs(request), self._gateway.options

            async def ask() -> Json:
                pending = await runs.list_runs(None, "pending", options.live_page + 1, 0)
                running = await runs.list_runs(None, "running", options.max_page, 0) if label else []
                return {
                    "pending": [
                        _queued(run) for run in pending[options.live_page - 1 :: -1]
                    ],  # who waits longest first
                    "more": len(pending) > options.live_page,
                    "running": running,
                }

            self._stored[label] = Fresh(ask, options.live_every_s, self._clock)
        return self._stored[label]


def _queued(run: Json) -> Json:
    """`queue` says where it stands and why, if the runner tells."""
    shown = {"run_id": run["run_id"], "workflow": run["assistant_id"], "created_at": run["created_at"]}
    return shown | ({"queue": run["queue"]} if run.get("queue") else {})


def page_of(snapshot: Json, offset: int, size: int, find: str = "", state: str | None = None) -> Json:
    """`size` rows from `offset` on, of those that match; `matched` says how many there are."""
    runs = snapshot["runs"]
    rows = [
        row
        for row in runs["rows"]
        if state in (None, row["state"])
        and (not find or any(find in text for text in (row["run_id"], row["workflow"], *row["now"])))
    ]
    kept = {**runs, "rows": rows[offset : offset + size], "matched": len(rows), "listed": len(runs["rows"])}
    return {**snapshot, "runs": {**kept, "offset": offset, "size": size}}


def of_tenant(snapshot: Json, label: str, own: set[str]) -> Json:
    """Other tenants' runs are neither listed nor counted; what they hold of a pool has no name."""

    def owns(run_id: str) -> bool:
        return run_id in own or run_id.startswith(f"ext:{label}:")

    rows = [row for row in snapshot["runs"]["rows"] if owns(row["run_id"])]
    runs = {
        "active": len(rows),
        "states": dict(Counter(row["state"] for row in rows)),
        "workflows": dict(Counter(row["workflow"] for row in rows)),
        "rows": rows,
    }
    return {**snapshot, "runs": runs, "replicas": [_unnamed(replica, owns) for replica in snapshot["replicas"]]}


def _unnamed(replica: Json, owns: Callable[[str], bool]) -> Json:
    pools: Json = {}
    for tier in ("device", "host"):
        pool = replica[tier]
        if pool is not None:
            pools[tier] = {**pool, "pieces": [piece for piece in pool["pieces"] if owns(piece[0])]}
    return {**replica, **pools}


def router(gateway: Gateway, live: Live) -> APIRouter:
    routes = APIRouter()
    options = gateway.options
    Offset = Annotated[int, Query(ge=0, le=options.live_rows)]
    Find = Annotated[str, Query(max_length=256)]

    @routes.get("/v1/live/snapshot", tags=["live"])
    async def snapshot(request: Request, offset: Offset = 0, find: Find = "", state: State | None = None) -> Response:
        """Runs in flight, replicas, and the rates of the last minutes, as the live page shows them."""
        return Response(await live.view(request, offset, find, state), media_type="application/json")

    @routes.get("/v1/live", tags=["live"])
    async def stream(request: Request, offset: Offset = 0, find: Find = "", state: State | None = None) -> Response:
        """The same every second, as server-sent events named `live`."""
        if live.viewers >= options.max_live_viewers:
            raise UnavailableError(f"{live.viewers} watch already, the most at a time; ask /v1/live/snapshot")
        first = await live.view(request, offset, find, state)  # what is wrong is told before the stream begins

        async def events() -> AsyncIterator[ServerSentEvent]:
            live.viewers += 1
            try:
                text = first
                while True:
                    yield ServerSentEvent(data=text, event="live", sep="\n")
                    await asyncio.sleep(options.live_every_s)
                    text = await live.view(request, offset, find, state)
            finally:
                live.viewers -= 1

        return EventSourceResponse(events(), sep="\n", ping=round(options.heartbeat_s) or 1)

    return routes

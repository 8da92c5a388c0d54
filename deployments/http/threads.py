"""Threads: the durable conversations that runs belong to, their states and histories."""

from typing import Annotated

from fastapi import APIRouter, Depends, Query, Request

from deployments.http import models
from deployments.http.body import described, json_body
from deployments.http.context import Gateway
from deployments.http.errors import shown
from deployments.http.models import CheckpointId, Json, Select, ThreadId, selected
from deployments.http.reserved import clean_metadata
from deployments.service import RunService
from pbkv_ray.errors import InputError, NotFoundError

Create = Annotated[models.ThreadCreate, Depends(json_body(models.ThreadCreate))]
Patch = Annotated[models.ThreadPatch, Depends(json_body(models.ThreadPatch))]
Search = Annotated[models.ThreadSearch, Depends(json_body(models.ThreadSearch))]
Count = Annotated[models.ThreadCount, Depends(json_body(models.ThreadCount))]
Update = Annotated[models.StateUpdate, Depends(json_body(models.StateUpdate))]
StateAt = Annotated[models.StateAt, Depends(json_body(models.StateAt))]
History = Annotated[models.History, Depends(json_body(models.History))]


def router(gateway: Gateway) -> APIRouter:
    routes = APIRouter(prefix="/threads", tags=["threads"])
    count_stripped = gateway.metrics.stripped

    @routes.post("", openapi_extra=described(models.ThreadCreate))
    async def create(request: Request, body: Create) -> Json:
        if body.supersteps:
            raise InputError("supersteps are given; threads start empty here, POST /threads/{id}/state fills one")
        _no_ttl(body.ttl)
        metadata = clean_metadata(body.metadata or {}, count_stripped)
        return await gateway.runs(request).create_thread(body.thread_id, metadata, body.if_exists)

    @routes.post("/search", openapi_extra=described(models.ThreadSearch))
    async def search(request: Request, body: Search) -> list[Json]:
        if body.extract:
            raise InputError("extract is given; it is not offered, ask for `select` and take the values apart")
        _page(body.limit, gateway.options.max_page)
        runs = gateway.runs(request)
        if body.ids is not None:
            found = [thread for thread in await _named(runs, body.ids) if _matches(thread, body)]
        elif body.values or body.sort_by:
            found = await _all(runs, body, gateway.options.max_scan)
        else:
            metadata = body.metadata or {}
            page = await runs.search_threads(metadata, body.status, body.limit, body.offset)
            return [selected(thread, body.select) for thread in page]
        if body.sort_by:
            key = "updated_at" if body.sort_by == "state_updated_at" else body.sort_by
            found.sort(key=lambda thread: str(thread.get(key)), reverse=body.sort_order == "desc")
        return [selected(thread, body.select) for thread in found[body.offset : body.offset + body.limit]]

    @routes.post("/count", openapi_extra=described(models.ThreadCount))
    async def count(request: Request, body: Count) -> int:
        return len(await _all(gateway.runs(request), body, gateway.options.max_scan))

    @routes.get("/{thread_id}")
    async def get(request: Request, thread_id: ThreadId) -> Json:
        return await gateway.runs(request).get_thread(thread_id)

    @routes.patch("/{thread_id}", openapi_extra=described(models.ThreadPatch))
    async def patch(request: Request, thread_id: ThreadId, body: Patch) -> Json:
        _no_ttl(body.ttl)
        metadata = clean_metadata(body.metadata or {}, count_stripped)
        return await gateway.runs(request).update_thread(thread_id, metadata)

    @routes.delete("/{thread_id}", status_code=204)
    async def delete(request: Request, thread_id: ThreadId) -> None:
        await gateway.runs(request).delete_thread(thread_id)

    @routes.get("/{thread_id}/state")
    async def state(request: Request, thread_id: ThreadId, select: Select = None, subgraphs: bool = False) -> Json:
        return selected(await gateway.runs(request).thread_state(thread_id, None), select)

    @routes.get("/{thread_id}/state/{checkpoint_id}")
    async def state_at(
        request: Request,
        thread_id: ThreadId,
        checkpoint_id: CheckpointId,
        select: Select = None,
        subgraphs: bool = False,
    ) -> Json:
        return selected(await gateway.runs(request).thread_state(thread_id, checkpoint_id), select)

    @routes.post("/{thread_id}/state/checkpoint", openapi_extra=described(models.StateAt))
    async def state_of(request: Request, thread_id: ThreadId, body: StateAt) -> Json:
        _root(body.checkpoint)
        found = await gateway.runs(request).thread_state(thread_id, body.checkpoint.checkpoint_id)
        return selected(found, body.select)

    @routes.post("/{thread_id}/state", openapi_extra=described(models.StateUpdate))
    async def update_state(request: Request, thread_id: ThreadId, body: Update) -> Json:
        if body.checkpoint_id or (body.checkpoint and body.checkpoint.checkpoint_id):
            raise InputError("a checkpoint is given; the newest state is the one that can be updated, leave it out")
        if isinstance(body.values, list):
            raise InputError("values is a list; send one object a request")
        return await gateway.runs(request).update_state(thread_id, body.values, body.as_node)

    @routes.post("/{thread_id}/history", openapi_extra=described(models.History))
    async def history(request: Request, thread_id: ThreadId, body: History) -> list[Json]:
        _page(body.limit, gateway.options.max_page)
        if body.checkpoint is not None:
            _root(body.checkpoint)
        found = await gateway.runs(request).thread_history(thread_id, body.limit, _checkpoint_id(body.before))
        wanted = body.metadata or {}
        return [selected(state, body.select) for state in found if _holds(state.get("metadata"), wanted)]

    @routes.get("/{thread_id}/history")
    async def get_history(
        request: Request,
        thread_id: ThreadId,
        limit: Annotated[int, Query(ge=1, le=gateway.options.max_page)] = 10,
        before: Annotated[str | None, Query(max_length=models.MAX_ID_LENGTH)] = None,
    ) -> list[Json]:
        return await gateway.runs(request).thread_history(thread_id, limit, before or None)

    return routes


def _no_ttl(ttl: object) -> None:
    if ttl is not None:
        raise InputError(f"ttl is {shown(ttl)}; threads are kept until they are deleted, leave it out")


def _page(limit: int, most: int) -> None:
    if limit > most:
        raise InputError(f"limit is {limit}; a page holds at most {most}, use offset for the next")


def _root(checkpoint: models.Checkpoint) -> None:
    if checkpoint.checkpoint_ns:
        raise InputError(f"checkpoint_ns is {shown(checkpoint.checkpoint_ns)}; only the root graph's is served")


def _checkpoint_id(before: str | Json | None) -> str | None:
    """`before` as the stock client sends it: an id, a checkpoint, or a config that holds one."""
    if not isinstance(before, dict):
        return before
    inner = before.get("configurable", before)
    found = inner.get("checkpoint_id") if isinstance(inner, dict) else None
    if not isinstance(found, str):
        raise InputError(f"before is {shown(before)}; send the id of the checkpoint to start from")
    return found


def _holds(row: object, wanted: Json) -> bool:
    return not wanted or (isinstance(row, dict) and all(row.get(key) == value for key, value in wanted.items()))


def _matches(thread: Json, body: models.ThreadCount) -> bool:
    return (
        (body.status is None or thread.get("status") == body.status)
        and _holds(thread.get("metadata"), body.metadata or {})
        and _holds(thread.get("values"), body.values or {})
    )


async def _named(runs: RunService, ids: list[str]) -> list[Json]:
    found = []
    for thread_id in dict.fromkeys(ids):
        try:
            found.append(await runs.get_thread(thread_id))
        except NotFoundError:
            continue
    return found


async def _all(runs: RunService, body: models.ThreadCount, most: int) -> list[Json]:
    """Every thread that matches. Raises InputError when more than `most` would have to be looked at."""
    found: list[Json] = []
    offset = 0
    while page := await runs.search_threads(body.metadata or {}, body.status, 1_000, offset):
        offset += len(page)
        found.extend(thread for thread in page if _matches(thread, body))
        if len(page) < 1_000:
            break
        if offset >= most:
            raise InputError(f"more than {most} threads match; narrow the search by metadata or status")
    return found

"""Runs: on a thread or stateless, in the background, streamed or awaited."""

import asyncio
from typing import Annotated, Literal, get_args

from fastapi import APIRouter, Depends, Header, Query, Request
from starlette.responses import Response

from deployments.http import models
from deployments.http.body import described, json_body
from deployments.http.context import Gateway
from deployments.http.errors import shown
from deployments.http.models import Json, RunCreate, RunId, Select, ThreadId, selected
from deployments.http.reserved import clean_config, clean_configurable, clean_metadata
from deployments.http.streams import awaited, sse
from deployments.service import RunRequest, RunService, StreamMode
from pbkv_ray.errors import InputError, NotFoundError, PbkvError

Body = Annotated[RunCreate, Depends(json_body(RunCreate))]
Action = Annotated[Literal["interrupt", "rollback"], Query()]
LastEventId = Annotated[str | None, Header(alias="last-event-id")]
_DOCS = described(RunCreate)


def to_request(gateway: Gateway, request: Request, body: RunCreate, thread_id: str | None) -> RunRequest:
    """Raises InputError for what we do not do, NotFoundError for an unknown assistant."""
    if body.webhook:
        raise InputError(f"webhook is {shown(body.webhook)}; the server calls no addresses, join the run instead")
    if body.after_seconds:
        raise InputError(f"after_seconds is {body.after_seconds}; runs start at once, send the request later")
    if body.input is not None and body.command is not None:
        raise InputError("input and command are both given; send input to start, command to resume")
    if body.checkpoint is not None and body.checkpoint.checkpoint_ns:
        raise InputError(f"checkpoint_ns is {shown(body.checkpoint.checkpoint_ns)}; only the root graph's is served")
    count = gateway.metrics.stripped
    config = clean_config(body.config.model_dump(exclude_none=True) if body.config else {}, count)
    # LangGraph's server treats the two alike, and so do our workflows, which declare no context of their own.
    configurable = {**clean_configurable(body.context or {}, count), **config.pop("configurable", {})}
    checkpoint = body.checkpoint_id or (body.checkpoint.checkpoint_id if body.checkpoint else None)
    if checkpoint:
        configurable["checkpoint_id"] = checkpoint
    if configurable:
        config["configurable"] = configurable
    tenant = gateway.tenant(request)
    return RunRequest(
        workflow=gateway.assistants.workflow(body.assistant_id),
        input=body.input,
        thread_id=thread_id,
        metadata=clean_metadata(body.metadata or {}, count),
        config=config,
        command=body.command.model_dump(exclude_unset=True) if body.command else None,
        stream_mode=_modes(body.stream_mode),
        multitask=body.multitask_strategy,
        interrupt_before=_names(body.interrupt_before),
        interrupt_after=_names(body.interrupt_after),
        keep_thread=thread_id is not None or body.on_completion != "delete",
        cache_salt=None if tenant is None else tenant.cache_salt,
        head_start_s=0.0 if tenant is None else tenant.head_start_s,
    )


def _modes(given: StreamMode | list[StreamMode] | None) -> tuple[StreamMode, ...]:
    names = [given] if isinstance(given, str) else given
    return tuple(dict.fromkeys(names or ("values",)))


def _names(given: str | list[str] | None) -> tuple[str, ...]:
    return (given,) if isinstance(given, str) else tuple(given or ())


def _where(run: Json, resumable: bool, tail: str) -> dict[str, str]:
    """Where the run is, and for a client that is cut off where to go on."""
    path = f"/threads/{run['thread_id']}/runs/{run['run_id']}"
    return {"content-location": path} | ({"location": f"{path}/{tail}"} if resumable else {})


def _after(last_event_id: str | None) -> int:
    """-1, which LangGraph's clients send for "from the start", is the start; so is no id at all."""
    if last_event_id is None or last_event_id in ("", "-1"):
        return 0
    if not (last_event_id.isascii() and last_event_id.isdigit() and len(last_event_id) <= 12):
        raise InputError(f"Last-Event-ID is {shown(last_event_id)}; it is the number of the last event received")
    return int(last_event_id)


def router(gateway: Gateway) -> APIRouter:
    routes = APIRouter(tags=["runs"])

    async def create(request: Request, body: RunCreate, thread_id: str | None, attached: bool) -> tuple[Json, bool]:
        """The stored run, and whether it stops when its client leaves."""
        made = to_request(gateway, request, body, thread_id)
        stops = attached and (body.on_disconnect or ("continue" if thread_id else "cancel")) == "cancel"
        runs = gateway.runs(request)
        if thread_id and body.if_not_exists == "create":
            await runs.create_thread(thread_id, {}, "do_nothing")
        return await runs.create_run(made), stops

    @routes.post("/threads/{thread_id}/runs", openapi_extra=_DOCS)
    async def create_run(request: Request, response: Response, thread_id: ThreadId, body: Body) -> Json:
        run, _ = await create(request, body, thread_id, False)
        response.headers.update(_where(run, False, ""))
        return gateway.assistants.named(run)

    @routes.post("/runs", openapi_extra=_DOCS)
    async def create_stateless(request: Request, response: Response, body: Body) -> Json:
        run, _ = await create(request, body, None, False)
        response.headers.update(_where(run, False, ""))
        return gateway.assistants.named(run)

    @routes.post("/threads/{thread_id}/runs/stream", openapi_extra=_DOCS)
    async def stream_run(request: Request, thread_id: ThreadId, body: Body) -> Response:
        run, stops = await create(request, body, thread_id, True)
        return sse(gateway, gateway.runs(request), run, cancel=stops, headers=_where(run, not stops, "stream"))

    @routes.post("/runs/stream", openapi_extra=_DOCS)
    async def stream_stateless(request: Request, body: Body) -> Response:
        run, stops = await create(request, body, None, True)
        return sse(gateway, gateway.runs(request), run, cancel=stops, headers=_where(run, not stops, "stream"))

    @routes.post("/threads/{thread_id}/runs/wait", openapi_extra=_DOCS)
    async def wait_run(request: Request, thread_id: ThreadId, body: Body) -> Response:
        run, stops = await create(request, body, thread_id, True)
        return awaited(gateway, gateway.runs(request), run, cancel=stops, headers=_where(run, not stops, "join"))

    @routes.post("/runs/wait", openapi_extra=_DOCS)
    async def wait_stateless(request: Request, body: Body) -> Response:
        run, stops = await create(request, body, None, True)
        return awaited(gateway, gateway.runs(request), run, cancel=stops, headers=_where(run, not stops, "join"))

    @routes.post("/runs/batch", openapi_extra=described(RunCreate, many=True))
    async def batch(
        request: Request, bodies: Annotated[list[RunCreate], Depends(json_body(list[RunCreate]))]
    ) -> list[Json]:
        """All of them or none: what was started is cancelled when a later one is refused."""
        if len(bodies) > gateway.options.max_batch_runs:
            raise InputError(
                f"the batch holds {len(bodies)} runs; at most {gateway.options.max_batch_runs} go in one, send several"
            )
        runs = gateway.runs(request)
        made: list[Json] = []
        try:
            for asked in [to_request(gateway, request, body, body.thread_id) for body in bodies]:
                made.append(await runs.create_run(asked))
        except PbkvError:
            for run in made:
                gateway.tasks.spawn(
                    runs.cancel_run(run["thread_id"], run["run_id"], "rollback"), "cancel of a refused batch"
                )
            raise
        return [gateway.assistants.named(run) for run in made]

    @routes.post("/runs/cancel", status_code=204, openapi_extra=described(models.CancelMany))
    async def cancel_many(
        request: Request,
        body: Annotated[models.CancelMany, Depends(json_body(models.CancelMany))],
        action: Action = "interrupt",
    ) -> None:
        runs = gateway.runs(request)
        for thread_id, run_id in await _chosen(runs, body, gateway.options.max_page):
            await runs.cancel_run(thread_id, run_id, action)

    @routes.get("/threads/{thread_id}/runs")
    async def list_runs(
        request: Request,
        thread_id: ThreadId,
        limit: Annotated[int, Query(ge=1, le=gateway.options.max_page)] = 10,
        offset: Annotated[int, Query(ge=0, le=2**31)] = 0,
        status: Annotated[models.RunStatus | None, Query()] = None,
        select: Select = None,
    ) -> list[Json]:
        found = await gateway.runs(request).list_runs(thread_id, status, limit, offset)
        return [selected(gateway.assistants.named(run), select) for run in found]

    @routes.get("/threads/{thread_id}/runs/{run_id}")
    async def get_run(request: Request, thread_id: ThreadId, run_id: RunId) -> Json:
        return gateway.assistants.named(await gateway.runs(request).get_run(thread_id, run_id))

    @routes.delete("/threads/{thread_id}/runs/{run_id}", status_code=204)
    async def delete_run(request: Request, thread_id: ThreadId, run_id: RunId) -> None:
        await gateway.runs(request).delete_run(thread_id, run_id)

    @routes.get("/threads/{thread_id}/runs/{run_id}/join")
    async def join(request: Request, thread_id: ThreadId, run_id: RunId) -> Response:
        runs = gateway.runs(request)
        run = await runs.get_run(thread_id, run_id)
        return awaited(gateway, runs, run, headers=_where(run, True, "join"))

    @routes.get("/threads/{thread_id}/runs/{run_id}/stream")
    async def join_stream(
        request: Request,
        thread_id: ThreadId,
        run_id: RunId,
        last_event_id: LastEventId = None,
        stream_mode: Annotated[list[str] | None, Query(max_length=16)] = None,
        cancel_on_disconnect: bool = False,
    ) -> Response:
        runs = gateway.runs(request)
        run = await runs.get_run(thread_id, run_id)
        wanted = [mode for mode in stream_mode or () if mode]  # the stock client sends an empty one for "all"
        if unknown := sorted(set(wanted) - set(get_args(StreamMode))):
            raise InputError(f"stream_mode is {shown(unknown[0])}; it must be one of {', '.join(get_args(StreamMode))}")
        return sse(
            gateway,
            runs,
            run,
            after=_after(last_event_id),
            modes=frozenset(mode.removesuffix("-tuple") for mode in wanted),
            cancel=cancel_on_disconnect,
            headers=_where(run, True, "stream"),
        )

    @routes.post("/threads/{thread_id}/runs/{run_id}/cancel")
    async def cancel(
        request: Request,
        thread_id: ThreadId,
        run_id: RunId,
        wait: bool = False,
        action: Action = "interrupt",
    ) -> Response:
        runs = gateway.runs(request)
        await runs.get_run(thread_id, run_id)
        task = gateway.tasks.spawn(runs.cancel_run(thread_id, run_id, action), f"cancel of run {run_id}")
        if not wait:
            return Response(status_code=202)
        await asyncio.shield(task)  # whoever asked may leave; the run stops all the same
        return Response(status_code=204)

    return routes


async def _chosen(runs: RunService, body: models.CancelMany, page: int) -> list[tuple[str | None, str]]:
    """The runs a bulk cancel names. Raises InputError when it names none, NotFoundError when there are none."""
    if body.run_ids:
        return [(body.thread_id, run_id) for run_id in body.run_ids]
    if body.status is None:
        raise InputError("neither run_ids nor status is given; say which runs to cancel")
    statuses = ("pending", "running") if body.status == "all" else (body.status,)
    found = [run for status in statuses for run in await runs.list_runs(body.thread_id, status, page, 0)]
    if not found:
        raise NotFoundError(f"no {body.status} run was found; there is nothing to cancel")
    return [(run["thread_id"], run["run_id"]) for run in found]

"""The HTTP gateway: LangGraph's Agent Protocol and OpenAI's chat protocol over a run service and an engine.

A plain FastAPI application without Ray; `deployments.app` puts it into a Serve deployment. One concern a file in
`deployments/http`: guard (host, keys, size), runs, threads, assistants, openai, extras, live, page.
"""

import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI

from deployments.http import assistants, errors, extras, live, openai, page, policy, runs, threads
from deployments.http.assistants_table import Assistants
from deployments.http.context import Gateway
from deployments.http.foreign import Emit, ForeignRuns
from deployments.http.guard import Guard
from deployments.http.openai import ChatBackend
from deployments.http.options import GatewayOptions, check_exposure
from deployments.metrics import GatewayMetrics, Part
from deployments.service import RunService
from pbkv_ray.errors import UnavailableError

__all__ = ["ChatBackend", "GatewayOptions", "check_exposure", "create_app"]


def _nobody(event: object) -> None:
    """Nobody listens."""


async def _unwatched(limit: int) -> dict[str, Any]:
    raise UnavailableError("this gateway has no controller to ask; runs are listed at /v1/runs")


def create_app(
    service: RunService,
    chat: ChatBackend,
    options: GatewayOptions | None = None,
    *,
    workflows: Mapping[str, str],
    emit: Emit = _nobody,
    metrics_parts: Mapping[str, Part] | None = None,
    about: Mapping[str, Any] | None = None,
    watch: live.Source = _unwatched,
    policies: policy.Policies = policy.no_policies,
    clock: Callable[[], float] = time.time,
) -> FastAPI:
    """The application. `workflows` maps each registered workflow's name to one sentence about it.

    `emit` takes the life cycle events of foreign runs, and must not block. `metrics_parts` are asked at every
    scrape of /metrics for the other parts' expositions. `about` is added to /info. `watch` gives the
    controller's snapshot with so many rows (`core.live.LiveView.snapshot`), for the live page at /.
    `policies` shows and switches the engines' cache policies (`deployments.http.policy`).
    """
    settings = options or GatewayOptions()
    gateway = Gateway(service, Assistants(workflows, clock()), settings, GatewayMetrics())
    lease_s = settings.foreign_lease_s
    foreign = ForeignRuns(emit, settings.max_foreign_runs, gateway.metrics, lease_s=lease_s, clock=clock)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        await gateway.tasks.close()

    app = FastAPI(title="pbkv-ray", summary="LangGraph workflows over HTTP", lifespan=lifespan, redoc_url=None)
    app.state.options = settings
    app.state.gateway = gateway
    app.state.foreign = foreign
    errors.install(app)
    app.add_middleware(Guard, options=settings, metrics=gateway.metrics)
    for part in (
        assistants.router(gateway),
        threads.router(gateway),
        runs.router(gateway),
        openai.router(gateway, chat, foreign),
        extras.router(gateway, dict(metrics_parts or {}), dict(about or {})),
        live.router(gateway, live.Live(gateway, watch)),
        page.router(),
        policy.router(policies),
    ):
        app.include_router(part)
    return app

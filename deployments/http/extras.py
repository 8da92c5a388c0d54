"""Our own routes beside the two protocols: health, what this server is, metrics, and runs across threads."""

from collections.abc import Mapping
from importlib.metadata import version
from typing import Annotated, Literal

from fastapi import APIRouter, Query, Request
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import Response

from deployments import metrics
from deployments.http import models
from deployments.http.context import Gateway
from deployments.http.models import Json, RunId


def router(gateway: Gateway, parts: Mapping[str, metrics.Part], about: Json) -> APIRouter:
    routes = APIRouter()

    @routes.get("/ok", tags=["server"])
    async def ok() -> Json:
        return {"ok": True}

    @routes.get("/info", tags=["server"])
    async def info() -> Json:
        return {
            "name": "pbkv-ray",
            "version": version("pbkv-ray"),
            "langgraph_py_version": version("langgraph"),
            "workflows": [row["graph_id"] for row in gateway.assistants.rows],
            "flags": {"assistants": True, "crons": False, "store": False, "strict_resume": False, "langsmith": False},
            "limits": {
                "body_bytes": gateway.options.max_body_bytes,
                "json_depth": gateway.options.max_json_depth,
                "batch_runs": gateway.options.max_batch_runs,
                "page": gateway.options.max_page,
            },
            **about,
        }

    @routes.get("/metrics", tags=["server"])
    async def exposition() -> Response:
        text = await metrics.exposition(
            gateway.metrics,
            parts,
            timeout_s=gateway.options.metrics_timeout_s,
            max_bytes=gateway.options.metrics_max_bytes,
        )
        return Response(text, media_type=CONTENT_TYPE_LATEST)

    @routes.get("/v1/runs", tags=["runs"])
    async def list_runs(
        request: Request,
        limit: Annotated[int, Query(ge=1, le=gateway.options.max_page)] = 10,
        offset: Annotated[int, Query(ge=0, le=2**31)] = 0,
        status: Annotated[models.RunStatus | None, Query()] = None,
    ) -> list[Json]:
        found = await gateway.runs(request).list_runs(None, status, limit, offset)
        return [gateway.assistants.named(run) for run in found]

    @routes.get("/v1/runs/{run_id}", tags=["runs"])
    async def get_run(request: Request, run_id: RunId) -> Json:
        return gateway.assistants.named(await gateway.runs(request).get_run(None, run_id))

    @routes.get("/v1/runs/{run_id}/calls", tags=["runs"])
    async def calls(request: Request, run_id: RunId) -> list[Json]:
        """The run's LLM calls: agent, step, prompt, cached and output tokens, seconds, replica."""
        return list(await gateway.runs(request).run_calls(run_id))

    @routes.get("/v1/runs/{run_id}/kv", tags=["runs"])
    async def kv(request: Request, run_id: RunId) -> Json:
        """The run's LLM calls as the KV cache saw them: replica and why it was chosen, cached tokens by tier, and for
        each span that the device did not hold the cause (docs/operators.md)."""
        return dict(await gateway.runs(request).run_kv(run_id))

    @routes.post("/v1/runs/{run_id}/cancel", tags=["runs"], status_code=204)
    async def cancel(
        request: Request, run_id: RunId, action: Annotated[Literal["interrupt", "rollback"], Query()] = "interrupt"
    ) -> None:
        await gateway.runs(request).cancel_run(None, run_id, action)

    return routes

"""Assistants: one for each registered workflow, read-only."""

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from deployments.http import models
from deployments.http.body import described, json_body
from deployments.http.context import Gateway
from deployments.http.errors import RefusedError
from deployments.http.models import AssistantId, Json, selected
from pbkv_ray.errors import InputError, NotFoundError

Search = Annotated[models.AssistantSearch, Depends(json_body(models.AssistantSearch))]
Count = Annotated[models.AssistantCount, Depends(json_body(models.AssistantCount))]
Versions = Annotated[models.AssistantVersions, Depends(json_body(models.AssistantVersions))]
Latest = Annotated[models.AssistantLatest, Depends(json_body(models.AssistantLatest))]


def router(gateway: Gateway) -> APIRouter:
    routes = APIRouter(prefix="/assistants", tags=["assistants"])
    table = gateway.assistants

    def found(body: models.AssistantCount) -> list[Json]:
        return [row for row in table.rows if _matches(row, body)]

    @routes.post("/search", openapi_extra=described(models.AssistantSearch))
    async def search(body: Search, response: Response) -> list[Json]:
        if body.limit > gateway.options.max_page:
            raise InputError(f"limit is {body.limit}; a page holds at most {gateway.options.max_page}")
        rows = found(body)
        if body.sort_by:
            key = body.sort_by
            rows.sort(key=lambda row: str(row[key]), reverse=body.sort_order == "desc")
        end = body.offset + body.limit
        if end < len(rows):
            response.headers["x-pagination-next"] = str(end)
        return [selected(row, body.select) for row in rows[body.offset : end]]

    @routes.post("/count", openapi_extra=described(models.AssistantCount))
    async def count(body: Count) -> int:
        return len(found(body))

    @routes.get("/{assistant_id}")
    async def get(assistant_id: AssistantId) -> Json:
        return table.row(assistant_id)

    @routes.get("/{assistant_id}/graph")
    async def graph(request: Request, assistant_id: AssistantId, xray: str | None = None) -> Json:
        return await gateway.service.graph_json(table.workflow(assistant_id))

    @routes.get("/{assistant_id}/schemas")
    async def schemas(request: Request, assistant_id: AssistantId) -> Json:
        workflow = table.workflow(assistant_id)
        return {"graph_id": workflow, **await gateway.service.graph_schemas(workflow)}

    @routes.get("/{assistant_id}/subgraphs")
    async def subgraphs(assistant_id: AssistantId, recurse: bool = False) -> Json:
        table.workflow(assistant_id)
        return {}

    @routes.post("/{assistant_id}/versions", openapi_extra=described(models.AssistantVersions))
    async def versions(assistant_id: AssistantId, body: Versions) -> list[Json]:
        return [table.row(assistant_id)][body.offset : body.offset + body.limit]

    @routes.post("/{assistant_id}/latest", openapi_extra=described(models.AssistantLatest))
    async def latest(assistant_id: AssistantId, body: Latest) -> Json:
        row = table.row(assistant_id)
        if body.version != row["version"]:
            raise NotFoundError(f"version {body.version} of {row['name']!r} does not exist; version 1 is its only one")
        return row

    @routes.post("", include_in_schema=False)
    @routes.patch("/{assistant_id}", include_in_schema=False)
    @routes.delete("/{assistant_id}", include_in_schema=False)
    async def fixed(assistant_id: str | None = None) -> Any:
        raise RefusedError(
            405, "assistants are the registered workflows and cannot be changed over HTTP; pass config with the run"
        )

    return routes


def _matches(row: Json, body: models.AssistantCount) -> bool:
    return (
        (body.graph_id is None or row["graph_id"] == body.graph_id)
        and (body.name is None or body.name.lower() in row["name"].lower())
        and all(row["metadata"].get(key) == value for key, value in (body.metadata or {}).items())
    )

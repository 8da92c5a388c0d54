"""A RunService that shows one tenant's threads and runs only; the others' do not exist for it.

The label goes into the metadata of every thread and run. A stateless run's thread is made by the runner and
carries none: it belongs to whom its runs belong to.
"""

from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any, Literal

from deployments.service import Json, RunEvent, RunRequest, RunService
from pbkv_ray.errors import NotFoundError

LABEL = "pbkv_tenant"


class TenantRuns:
    def __init__(self, service: RunService, label: str) -> None:
        self._service = service
        self._label = label

    async def create_thread(
        self, thread_id: str | None, metadata: Json, if_exists: Literal["raise", "do_nothing"]
    ) -> Json:
        thread = await self._service.create_thread(thread_id, self._labelled(metadata), if_exists)
        await self._check_thread(thread["thread_id"], thread)  # it may have been there, and another's
        return thread

    async def get_thread(self, thread_id: str) -> Json:
        return await self._check_thread(thread_id)

    async def update_thread(self, thread_id: str, metadata: Json) -> Json:
        await self._check_thread(thread_id)
        return await self._service.update_thread(thread_id, self._labelled(metadata))

    async def search_threads(self, metadata: Json, status: str | None, limit: int, offset: int) -> list[Json]:
        return await self._service.search_threads(self._labelled(metadata), status, limit, offset)

    async def delete_thread(self, thread_id: str) -> None:
        await self._check_thread(thread_id)
        await self._service.delete_thread(thread_id)

    async def thread_state(self, thread_id: str, checkpoint_id: str | None) -> Json:
        await self._check_thread(thread_id)
        return await self._service.thread_state(thread_id, checkpoint_id)

    async def update_state(self, thread_id: str, values: Json | None, as_node: str | None) -> Json:
        await self._check_thread(thread_id)
        return await self._service.update_state(thread_id, values, as_node)

    async def thread_history(self, thread_id: str, limit: int, before: str | None) -> list[Json]:
        await self._check_thread(thread_id)
        return await self._service.thread_history(thread_id, limit, before)

    async def create_run(self, request: RunRequest) -> Json:
        if request.thread_id is not None:
            await self._check_thread(request.thread_id)
        return await self._service.create_run(replace(request, metadata=self._labelled(request.metadata)))

    async def list_runs(self, thread_id: str | None, status: str | None, limit: int, offset: int) -> list[Json]:
        if thread_id is not None:
            await self._check_thread(thread_id)
            return await self._service.list_runs(thread_id, status, limit, offset)
        found: list[Json] = []
        position = 0
        while len(found) < offset + limit:
            page = await self._service.list_runs(None, status, 1_000, position)
            found.extend(run for run in page if self._owns(run))
            position += len(page)
            if len(page) < 1_000:
                break
        return found[offset : offset + limit]

    async def get_run(self, thread_id: str | None, run_id: str) -> Json:
        return await self._check_run(thread_id, run_id)

    async def cancel_run(self, thread_id: str | None, run_id: str, action: Literal["interrupt", "rollback"]) -> None:
        await self._check_run(thread_id, run_id)
        await self._service.cancel_run(thread_id, run_id, action)

    async def delete_run(self, thread_id: str, run_id: str) -> None:
        await self._check_run(thread_id, run_id)
        await self._service.delete_run(thread_id, run_id)

    async def wait_run(self, thread_id: str | None, run_id: str) -> Json:
        await self._check_run(thread_id, run_id)
        return await self._service.wait_run(thread_id, run_id)

    async def stream_run(self, thread_id: str | None, run_id: str, after: int) -> AsyncIterator[RunEvent]:
        await self._check_run(thread_id, run_id)
        stream = self._service.stream_run(thread_id, run_id, after)
        try:
            async for event in stream:
                yield event
        finally:
            close = getattr(stream, "aclose", None)
            if close is not None:
                await close()

    async def graph_json(self, workflow: str) -> Json:
        return await self._service.graph_json(workflow)

    async def graph_schemas(self, workflow: str) -> Json:
        return await self._service.graph_schemas(workflow)

    async def run_calls(self, run_id: str) -> Sequence[Json]:
        await self._check_run(None, run_id)
        return await self._service.run_calls(run_id)

    async def run_kv(self, run_id: str) -> Json:
        await self._check_run(None, run_id)
        return await self._service.run_kv(run_id)

    def _labelled(self, metadata: Json) -> Json:
        return {**metadata, LABEL: self._label}

    def _owns(self, row: dict[str, Any]) -> bool:
        return (row.get("metadata") or {}).get(LABEL) == self._label

    async def _check_thread(self, thread_id: str, thread: Json | None = None) -> Json:
        thread = thread or await self._service.get_thread(thread_id)
        if not self._owns(thread):
            runs = await self._service.list_runs(thread_id, None, 1, 0)
            if LABEL in (thread.get("metadata") or {}) or not any(self._owns(run) for run in runs):
                raise NotFoundError(f"thread {thread_id!r} does not exist; POST /threads makes one")
        return thread

    async def _check_run(self, thread_id: str | None, run_id: str) -> Json:
        run = await self._service.get_run(thread_id, run_id)
        if not self._owns(run):
            raise NotFoundError(f"run {run_id!r} does not exist")
        return run

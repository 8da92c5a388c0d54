"""Threads as the protocol shows them: the stored record joined with LangGraph's checkpoints."""

import json
from collections.abc import Callable
from typing import Any, Literal

from langchain_core.runnables import RunnableConfig
from langgraph.errors import InvalidUpdateError
from langgraph.types import StateSnapshot

from deployments.encoding import iso, plain
from deployments.graphs import Graphs, reachable, thread_config
from deployments.service import Json
from pbkv_ray.errors import ConflictError, InputError, NotFoundError
from pbkv_ray.store import Store, ThreadRow

MAX_ID_LENGTH = 256
MAX_HISTORY = 1_000


class ThreadService:
    def __init__(self, store: Store, graphs: Graphs, clock: Callable[[], float], new_id: Callable[[], str]) -> None:
        self._store = store
        self._graphs = graphs
        self._clock = clock
        self._new_id = new_id

    async def create(self, thread_id: str | None, metadata: Json, if_exists: Literal["raise", "do_nothing"]) -> Json:
        checked_metadata(metadata)
        thread_id = self._new_id() if thread_id is None else checked_id("thread_id", thread_id)
        try:
            return thread_json(await self._store.threads.create(thread_id, metadata, self._clock()))
        except ConflictError:
            if if_exists == "raise":
                raise
            return await self.get(thread_id)

    async def get(self, thread_id: str) -> Json:
        return thread_json(await self._store.threads.get(thread_id))

    async def update(self, thread_id: str, metadata: Json) -> Json:
        checked_metadata(metadata)
        return thread_json(await self._store.threads.update(thread_id, metadata, self._clock()))

    async def search(self, metadata: Json, status: str | None, limit: int, offset: int) -> list[Json]:
        return [thread_json(row) for row in await self._store.threads.search(metadata, status, limit, offset)]

    async def delete(self, thread_id: str) -> None:
        """The thread with its runs and checkpoints. ConflictError while a run is in flight."""
        await self._store.threads.get(thread_id)
        while await self._store.runs.delete_of_thread(thread_id):
            pass
        await self._graphs.forget(thread_id)
        await self._store.threads.delete(thread_id)

    # --- checkpoints ---

    async def state(self, thread_id: str, checkpoint_id: str | None) -> Json:
        """The state at a checkpoint, the newest by default; an empty state when nothing ran yet."""
        row = await self._store.threads.get(thread_id)
        if row.workflow is None:
            return empty_state(thread_id)
        config = thread_config(thread_id, checkpoint_id)
        try:
            with reachable():
                snapshot = await self._graphs.compiled(row.workflow).aget_state(config)
        except ValueError as error:
            raise NotFoundError(f"thread {thread_id!r} has no checkpoint {checkpoint_id!r}") from error
        if checkpoint_id is not None and snapshot.created_at is None:
            raise NotFoundError(f"thread {thread_id!r} has no checkpoint {checkpoint_id!r}; see its history")
        return state_json(thread_id, snapshot)

    async def history(self, thread_id: str, limit: int, before: str | None) -> list[Json]:
        """Newest first, `limit` of 1 to 1000, those older than checkpoint `before`."""
        if not 1 <= limit <= MAX_HISTORY:
            raise InputError(f"limit is {limit}; it must be 1..{MAX_HISTORY}")
        row = await self._store.threads.get(thread_id)
        if row.workflow is None:
            return []
        states = self._graphs.compiled(row.workflow).aget_state_history(
            thread_config(thread_id), limit=limit, before=None if before is None else thread_config(thread_id, before)
        )
        with reachable():
            return [state_json(thread_id, snapshot) async for snapshot in states]

    async def update_state(self, thread_id: str, values: Json | None, as_node: str | None) -> Json:
        """Writes a checkpoint as if graph node `as_node` had returned `values`. ConflictError on a busy thread."""
        row = await self._store.threads.get(thread_id)
        if row.status == "busy":
            raise ConflictError(f"thread {thread_id!r} is busy; wait for its run or cancel it")
        if row.workflow is None:
            raise ConflictError(f"thread {thread_id!r} has had no run, so no workflow to update; run one first")
        graph = self._graphs.compiled(row.workflow)
        try:
            with reachable():
                config = await graph.aupdate_state(thread_config(thread_id), values, as_node=as_node)
        except InvalidUpdateError as error:
            raise InputError(f"thread {thread_id!r} refuses the update: {error}") from error
        view = await self._graphs.view(row.workflow, thread_id)
        await self._store.threads.set_state(thread_id, view.state, view.status, self._clock())
        return {"checkpoint": checkpoint_json(thread_id, config)}


def thread_json(row: ThreadRow) -> Json:
    state = json.loads(row.state)
    graph = {} if row.workflow is None else {"graph_id": row.workflow, "assistant_id": row.workflow}
    return {
        "thread_id": row.thread_id,
        "created_at": iso(row.created_at),
        "updated_at": iso(row.updated_at),
        "metadata": graph | row.metadata,
        "status": row.status,
        "values": state["values"],
        "interrupts": state["interrupts"],
    }


def state_json(thread_id: str, snapshot: StateSnapshot) -> Json:
    return {
        "values": plain(snapshot.values),
        "next": list(snapshot.next),
        "checkpoint": checkpoint_json(thread_id, snapshot.config),
        "metadata": plain(snapshot.metadata),
        "created_at": snapshot.created_at,
        "parent_checkpoint": checkpoint_json(thread_id, snapshot.parent_config),
        "tasks": [
            {
                "id": task.id,
                "name": task.name,
                "error": None if task.error is None else str(task.error),
                "interrupts": plain(task.interrupts),
                "checkpoint": None,
                "state": None,
                "result": plain(task.result),
            }
            for task in snapshot.tasks
        ],
        "interrupts": plain(snapshot.interrupts),
    }


def empty_state(thread_id: str) -> Json:
    return {
        "values": {},
        "next": [],
        "checkpoint": checkpoint_json(thread_id, {"configurable": {}}),
        "metadata": {},
        "created_at": None,
        "parent_checkpoint": None,
        "tasks": [],
        "interrupts": [],
    }


def checkpoint_json(thread_id: str, config: RunnableConfig | None) -> Json | None:
    if config is None:
        return None
    found: dict[str, Any] = config.get("configurable", {})
    return {
        "thread_id": thread_id,
        "checkpoint_ns": found.get("checkpoint_ns", ""),
        "checkpoint_id": found.get("checkpoint_id"),
        "checkpoint_map": None,
    }


def checked_id(name: str, value: str) -> str:
    """InputError for ids that are empty, overlong, or hold what a URL or a database would stumble on."""
    if not 1 <= len(value) <= MAX_ID_LENGTH or not value.isprintable() or "/" in value:
        raise InputError(f"{name} {value[:40]!r} must be 1 to {MAX_ID_LENGTH} printable characters without a slash")
    return value


def checked_metadata(metadata: Json) -> None:
    if "\\u0000" in json.dumps(metadata):
        raise InputError("metadata holds a NUL character, which the store cannot search; leave it out")

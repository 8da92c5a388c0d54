"""The bodies of LangGraph's Agent Protocol, as `langgraph_sdk` sends them. Unknown fields are ignored.

What we do not do and whose absence would change the meaning of a request is refused, never ignored.
"""

from typing import Annotated, Any, Literal

from fastapi import Path, Query
from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from deployments.service import StreamMode

Json = dict[str, Any]

MAX_ID_LENGTH = 256
# Printable ASCII without space: ids go into URLs, log lines and headers.
_ID = rf"^[\x21-\x7e]{{1,{MAX_ID_LENGTH}}}$"
Id = Annotated[str, StringConstraints(pattern=_ID)]
ThreadId = Annotated[str, Path(pattern=_ID)]
RunId = Annotated[str, Path(pattern=_ID)]
CheckpointId = Annotated[str, Path(pattern=_ID)]
AssistantId = Annotated[str, Path(min_length=1, max_length=MAX_ID_LENGTH)]
Select = Annotated[list[str] | None, Query(max_length=64)]
Name = Annotated[str, StringConstraints(min_length=1, max_length=MAX_ID_LENGTH)]
Names = Literal["*"] | Annotated[list[Name], Field(max_length=256)]

RunStatus = Literal["pending", "running", "error", "success", "timeout", "interrupted"]
ThreadStatus = Literal["idle", "busy", "interrupted", "error"]
Limit = Annotated[int, Field(ge=1)]
Offset = Annotated[int, Field(ge=0, le=2**31)]
SortOrder = Literal["asc", "desc"]


class Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")


class Checkpoint(Body):
    thread_id: Id | None = None
    checkpoint_ns: str | None = None
    checkpoint_id: Id | None = None


class Command(Body):
    """LangGraph's Command: resume an interrupt, update the state, go to a graph node."""

    update: Json | list[Any] | None = None
    resume: Any = None
    goto: str | Json | list[str | Json] | None = None


class RunConfig(BaseModel):
    """LangGraph's config. What else comes in it is dropped in `reserved.clean_config`, and counted."""

    model_config = ConfigDict(strict=True, extra="allow")

    tags: Annotated[list[str], Field(max_length=256)] | None = None
    recursion_limit: Annotated[int, Field(ge=1, le=1_000)] | None = None
    configurable: Json | None = None
    metadata: Json | None = None
    run_name: Name | None = None
    max_concurrency: Annotated[int, Field(ge=1, le=1_000)] | None = None


class RunCreate(Body):
    assistant_id: Name
    thread_id: Id | None = None  # read in a batch only; elsewhere the path says it
    input: Json | None = None
    command: Command | None = None
    metadata: Json | None = None
    config: RunConfig | None = None
    context: Json | None = None
    stream_mode: StreamMode | Annotated[list[StreamMode], Field(max_length=16)] | None = None
    interrupt_before: Names | None = None
    interrupt_after: Names | None = None
    multitask_strategy: Literal["reject", "enqueue", "interrupt", "rollback"] = "reject"
    if_not_exists: Literal["create", "reject"] = "reject"
    on_disconnect: Literal["cancel", "continue"] | None = None
    on_completion: Literal["delete", "keep"] | None = None
    checkpoint: Checkpoint | None = None
    checkpoint_id: Id | None = None
    webhook: str | None = None
    after_seconds: float | int | None = None


class ThreadCreate(Body):
    thread_id: Id | None = None
    metadata: Json | None = None
    if_exists: Literal["raise", "do_nothing"] = "raise"
    supersteps: list[Json] | None = None
    ttl: Json | int | float | None = None


class ThreadPatch(Body):
    metadata: Json | None = None
    ttl: Json | int | float | None = None


class ThreadCount(Body):
    metadata: Json | None = None
    values: Json | None = None
    status: ThreadStatus | None = None


class ThreadSearch(ThreadCount):
    ids: Annotated[list[Id], Field(max_length=1_000)] | None = None
    limit: Limit = 10
    offset: Offset = 0
    sort_by: Literal["thread_id", "status", "created_at", "updated_at", "state_updated_at"] | None = None
    sort_order: SortOrder = "desc"
    select: Annotated[list[str], Field(max_length=64)] | None = None
    extract: Json | None = None


class StateUpdate(Body):
    values: Json | list[Json] | None = None
    as_node: Name | None = None
    checkpoint: Checkpoint | None = None
    checkpoint_id: Id | None = None


class StateAt(Body):
    checkpoint: Checkpoint
    subgraphs: bool = False
    select: Annotated[list[str], Field(max_length=64)] | None = None


class History(Body):
    limit: Limit = 10
    before: Id | Json | None = None
    metadata: Json | None = None
    checkpoint: Checkpoint | None = None
    select: Annotated[list[str], Field(max_length=64)] | None = None


class CancelMany(Body):
    thread_id: Id | None = None
    run_ids: Annotated[list[Id], Field(max_length=1_000)] | None = None
    status: Literal["pending", "running", "all"] | None = None


class AssistantCount(Body):
    metadata: Json | None = None
    graph_id: str | None = None
    name: str | None = None


class AssistantSearch(AssistantCount):
    limit: Limit = 10
    offset: Offset = 0
    sort_by: Literal["assistant_id", "graph_id", "name", "created_at", "updated_at"] | None = None
    sort_order: SortOrder = "asc"
    select: Annotated[list[str], Field(max_length=64)] | None = None


class AssistantVersions(Body):
    metadata: Json | None = None
    limit: Limit = 10
    offset: Offset = 0


class AssistantLatest(Body):
    version: Annotated[int, Field(ge=1)]


def selected(row: Json, select: list[str] | None) -> Json:
    """`row` with the fields of `select` only; `values.KEY` keeps one key of the values."""
    if not select:
        return row
    kept = {name: row[name] for name in select if name in row}
    for name in select:
        parent, dot, key = name.partition(".")
        inside = row.get(parent)
        if dot and isinstance(inside, dict) and key in inside and parent not in select:
            kept.setdefault(parent, {})[key] = inside[key]
    return kept

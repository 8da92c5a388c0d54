"""The workflows as compiled graphs, and what their checkpoints say of a thread."""

import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import psycopg
import psycopg_pool
from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.base import BaseCheckpointSaver, CheckpointTuple
from langgraph.graph import StateGraph
from langgraph.graph.state import CompiledStateGraph
from langgraph.types import Interrupt, StateSnapshot
from pydantic import BaseModel, ValidationError
from pydantic.errors import PydanticUserError

from deployments.encoding import plain, to_json
from deployments.service import Json
from pbkv_ray.errors import InputError, StoreError
from pbkv_ray.graph.client import LLM
from pbkv_ray.store import RunRow, ThreadStatus

# What the checkpoint savers raise when their database is away.
SAVER_AWAY = (psycopg.OperationalError, psycopg_pool.PoolTimeout, sqlite3.OperationalError)
RUN_KEY = "pbkv_run_id"  # in a checkpoint's metadata: the run that wrote it
Graph = CompiledStateGraph[Any, Any, Any, Any]


class Workflow(Protocol):
    """What we read of `workflows.registry.WorkflowSpec`."""

    @property
    def agents(self) -> Sequence[str]: ...
    @property
    def input_model(self) -> type[BaseModel]: ...
    @property
    def recursion_limit(self) -> int: ...

    def build(self, llm: Any) -> StateGraph[Any, Any, Any, Any]: ...


class Registry(Protocol):
    def get(self, name: str) -> Workflow:
        """NotFoundError for an unknown name."""


@dataclass(frozen=True, slots=True)
class ThreadView:
    """A thread as its newest checkpoint shows it. `state` is the JSON text that the store keeps."""

    values: Any
    interrupts: dict[str, list[Json]]
    waiting: bool  # there are tasks left, or done ones whose step no checkpoint concludes yet
    next: tuple[str, ...]  # graph nodes that are still to run

    @property
    def status(self) -> ThreadStatus:
        return "interrupted" if self.waiting else "idle"

    @property
    def state(self) -> str:
        return to_json({"values": self.values, "interrupts": self.interrupts})


class Graphs:
    """Compiles each workflow once; a compiled graph keeps no state of a run."""

    def __init__(self, registry: Registry, llm: LLM, checkpointer: BaseCheckpointSaver[Any]) -> None:
        self._registry = registry
        self._llm = llm
        self._checkpointer = checkpointer
        self._compiled: dict[str, Graph] = {}

    def spec(self, workflow: str) -> Workflow:
        return self._registry.get(workflow)

    def compiled(self, workflow: str) -> Graph:
        if workflow not in self._compiled:
            graph = self.spec(workflow).build(self._llm)
            self._compiled[workflow] = graph.compile(checkpointer=self._checkpointer, name=workflow)
        return self._compiled[workflow]

    def edges(self, workflow: str) -> tuple[tuple[str, str], ...]:
        return tuple((edge.source, edge.target) for edge in self.compiled(workflow).get_graph().edges)

    def schemas(self, workflow: str) -> Json:
        """JSON schemas by name; None where pydantic cannot say (a `typing.TypedDict` before Python 3.12)."""
        graph = self.compiled(workflow)
        state = _schema(graph.get_output_jsonschema)
        return {
            "graph_id": workflow,
            "input_schema": self.spec(workflow).input_model.model_json_schema(),
            "output_schema": state,
            "state_schema": state,
            "config_schema": None,
            "context_schema": _schema(graph.get_context_jsonschema),
        }

    def validated(self, workflow: str, given: Json) -> Json:
        """The input as the workflow's model has it, defaults filled. InputError says what is wrong where."""
        try:
            return self.spec(workflow).input_model.model_validate(given).model_dump()
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            place = ".".join(str(part) for part in first["loc"]) or "input"
            raise InputError(
                f"input of workflow {workflow!r}: {place}: {first['msg']}; got {str(first['input'])[:100]!r}. "
                f"GET /assistants/{workflow}/schemas shows what it takes"
            ) from error

    # --- checkpoints ---

    async def newest(self, thread_id: str) -> CheckpointTuple | None:
        with reachable():
            return await self._checkpointer.aget_tuple(thread_config(thread_id))

    async def view(self, workflow: str, thread_id: str) -> ThreadView:
        with reachable():
            return view_of(await self.compiled(workflow).aget_state(thread_config(thread_id)))

    async def forget(self, thread_id: str) -> None:
        with reachable():
            await self._checkpointer.adelete_thread(thread_id)

    async def roll_back(self, run: RunRow, base_checkpoint: str | None) -> None:
        """Puts the thread back to where it stood before the run: at a checkpoint, or (None) at nothing.

        The savers cannot delete single checkpoints, so a thread with a past gets a copy of its old newest
        checkpoint on top; what the run wrote stays below it, as history.
        """
        newest = await self.newest(run.thread_id)
        if newest is None or newest.metadata.get(RUN_KEY) != run.run_id:
            return
        if base_checkpoint is None:
            await self.forget(run.thread_id)
            return
        graph = self.compiled(run.workflow)
        base = await graph.aget_state(thread_config(run.thread_id, base_checkpoint))
        copied = await graph.aupdate_state(base.config, None, as_node="__copy__")
        copy = await graph.aget_state(copied)
        for before, now in zip(base.tasks, copy.tasks, strict=False):
            # LangGraph leaves the open questions behind; a question's id names the task that asks it.
            asked = [Interrupt.from_ns(one.value, f"{now.name}:{now.id}") for one in before.interrupts]
            if asked:
                await self._checkpointer.aput_writes(copied, [("__interrupt__", asked)], now.id)


@contextmanager
def reachable() -> Iterator[None]:
    """Raises StoreError for a checkpoint saver whose database is away."""
    try:
        yield
    except SAVER_AWAY as error:
        reason = str(error).partition("\n")[0]
        raise StoreError(f"the checkpoints' database does not answer ({reason:.200}); try again") from error


def _schema(make: Callable[[], Json | None]) -> Json | None:
    try:
        return make()
    except PydanticUserError:
        return None


def thread_config(thread_id: str, checkpoint_id: str | None = None) -> RunnableConfig:
    configurable = {"thread_id": thread_id} | ({} if checkpoint_id is None else {"checkpoint_id": checkpoint_id})
    return {"configurable": configurable}


def view_of(snapshot: StateSnapshot) -> ThreadView:
    interrupts = {task.id: [plain(i) for i in task.interrupts] for task in snapshot.tasks if task.interrupts}
    return ThreadView(plain(snapshot.values), interrupts, bool(snapshot.tasks), snapshot.next)

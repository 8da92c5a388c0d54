"""One attempt of a run: from its stored request, through LangGraph, to what it ended as."""

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Literal

from langchain_core.runnables import RunnableConfig
from langgraph.types import Command, Send

from deployments.encoding import request_from_text, to_json
from deployments.endings import finished
from deployments.graphs import RUN_KEY, Graph, Graphs, ThreadView, thread_config, view_of
from deployments.messages import MessageEvents
from deployments.service import Json, RunRequest
from pbkv_ray.errors import InputError
from pbkv_ray.graph.callback import LifecycleCallback
from pbkv_ray.graph.context import RunContext, running
from pbkv_ray.store import Ending, RunRow

Publish = Callable[[str, str], Awaitable[None]]
Durability = Literal["sync", "async", "exit"]
MODES = frozenset(
    ("values", "updates", "messages", "messages-tuple", "custom", "events", "debug", "tasks", "checkpoints")
)


@dataclass(frozen=True, slots=True)
class Attempt:
    """A claimed run with what was read of it."""

    run: RunRow
    request: RunRequest

    @classmethod
    def of(cls, run: RunRow) -> "Attempt":
        return cls(run, request_from_text(run.request))


class Execution:
    """`durability` is LangGraph's: "async" writes a checkpoint while the next step runs, "sync" before it."""

    def __init__(
        self,
        graphs: Graphs,
        set_base: Callable[[RunRow, str | None], Awaitable[None]],
        max_steps: int,
        durability: Durability,
    ) -> None:
        self._graphs = graphs
        self._set_base = set_base
        self._max_steps = max_steps
        self._durability = durability

    async def run(self, attempt: Attempt, callback: LifecycleCallback, publish: Publish) -> Ending:
        """Executes the graph to its end, an interrupt, or an exception, which it lets through."""
        run, request = attempt.run, attempt.request
        graph = self._graphs.compiled(run.workflow)
        config = self._config(attempt, callback)
        await publish("metadata", to_json({"run_id": run.run_id, "attempt": run.attempt}))
        entry = await self._entry(attempt, config)
        if not isinstance(entry, ThreadView):
            messages = MessageEvents(
                whole="messages" in request.stream_mode, pairs="messages-tuple" in request.stream_mode
            )
            with running(RunContext(run.run_id, run.workflow, request.cache_salt)):
                async with aclosing(self._parts(graph, entry, config, request)) as parts:
                    async for mode, part in parts:
                        if mode == "messages":
                            for event, data in messages.of(*part):
                                await publish(event, to_json(data))
                        else:
                            await publish(mode, to_json(part))
            entry = view_of(await graph.aget_state(thread_config(run.thread_id)))
        return finished(run, entry)

    async def _parts(
        self, graph: Graph, entry: Any, config: RunnableConfig, request: RunRequest
    ) -> AsyncGenerator[tuple[str, Any], None]:
        """(stream mode, part) as the graph goes on."""
        asked = {"messages" if mode.startswith("messages") else mode for mode in request.stream_mode} or {"values"}
        options: dict[str, Any] = {
            "stream_mode": sorted(asked - {"events"}),
            "interrupt_before": _nodes(request.interrupt_before),
            "interrupt_after": _nodes(request.interrupt_after),
            "durability": self._durability,
        }
        if "events" not in asked:
            async with aclosing(graph.astream(entry, config, **options)) as parts:  # type: ignore[type-var]
                async for part in parts:
                    yield part
            return
        # LangChain's own events hold the graph's stream as those of the root, which are the other modes' parts.
        async with aclosing(graph.astream_events(entry, config, version="v2", **options)) as events:  # type: ignore[type-var]
            async for event in events:
                if event["event"] == "on_chain_stream" and not event["parent_ids"]:
                    yield event["data"]["chunk"]
                else:
                    yield "events", event

    async def _entry(self, attempt: Attempt, config: RunnableConfig) -> Any:
        """What to hand to the graph; a ThreadView when there is nothing left to do.

        A checkpoint that names this run means that an earlier attempt got that far: go on from there. Else nothing
        of it ran (or nothing that a checkpoint knows of), and it starts with its input.
        """
        run, request = attempt.run, attempt.request
        newest = await self._graphs.newest(run.thread_id)
        if newest is not None and newest.metadata.get(RUN_KEY) == run.run_id:
            config["configurable"].pop("checkpoint_id", None)
            view = await self._graphs.view(run.workflow, run.thread_id)
            return view if stops_at(view, request) else None
        base = None if newest is None else newest.config["configurable"]["checkpoint_id"]
        if base != run.base_checkpoint:
            await self._set_base(run, base)
        if request.command is not None:
            return command_of(request.command)
        if request.input is not None:
            return self._graphs.validated(run.workflow, request.input)
        if newest is None:
            raise InputError(f"run {run.run_id!r} has no input and its thread nothing to go on with; give an input")
        return None

    def _config(self, attempt: Attempt, callback: LifecycleCallback) -> RunnableConfig:
        run, asked = attempt.run, attempt.request.config
        limit = asked.get("recursion_limit") or self._graphs.spec(run.workflow).recursion_limit
        return {
            "configurable": {**user_configurable(asked), "thread_id": run.thread_id},
            "metadata": {**scalars(run.metadata), RUN_KEY: run.run_id, "pbkv_workflow": run.workflow},
            "tags": [str(tag) for tag in asked.get("tags") or ()],
            "callbacks": [callback],
            "recursion_limit": min(int(limit), self._max_steps),
        }


def _nodes(names: tuple[str, ...]) -> Literal["*"] | list[str] | None:
    return "*" if "*" in names else list(names) or None


def stops_at(view: ThreadView, request: RunRequest) -> bool:
    """Whether an earlier attempt of this run had got as far as the run goes."""
    return (
        not view.waiting or "*" in request.interrupt_before or not set(request.interrupt_before).isdisjoint(view.next)
    )


def user_configurable(config: Json) -> Json:
    """What a client may set: nothing of LangGraph's internals ("__..."), no other thread, no namespace."""
    given = config.get("configurable") or {}
    reserved = ("thread_id", "checkpoint_ns", "checkpoint_map")
    return {key: value for key, value in given.items() if key not in reserved and not key.startswith("__")}


def scalars(metadata: Json) -> Json:
    """Metadata that LangGraph may copy into checkpoints; `pbkv_` names are ours."""
    return {
        key: value
        for key, value in metadata.items()
        if isinstance(value, str | int | float | bool) and not key.startswith("pbkv_")
    }


def command_of(given: Json) -> Command[Any]:
    """InputError for anything but resume, update and goto in the SDK's shape."""
    unknown = sorted(set(given) - {"resume", "update", "goto"})
    if unknown:
        raise InputError(f"command has {', '.join(unknown)}; it may have resume, update and goto")
    goto = given.get("goto")
    targets = goto if isinstance(goto, list) else [] if goto is None else [goto]
    try:
        sends = [one if isinstance(one, str) else Send(one["node"], one.get("input")) for one in targets]
    except (KeyError, TypeError, AttributeError) as error:
        raise InputError(f'command.goto is {goto!r}; give a graph node\'s name or {{"node", "input"}}') from error
    update = given.get("update")
    if isinstance(update, list):
        update = [tuple(pair) for pair in update]
    return Command(resume=given.get("resume"), update=update, goto=sends)


def check_modes(modes: tuple[str, ...]) -> None:
    unknown = sorted(set(modes) - MODES)
    if unknown:
        raise InputError(f"stream_mode {', '.join(unknown)} is not served; give any of {', '.join(sorted(MODES))}")

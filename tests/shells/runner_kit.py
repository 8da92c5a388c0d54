"""A runner on a real store with real LangGraph graphs; only the engine behind the LLM client is a fake."""

import asyncio
import operator
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from time import time
from typing import Annotated, Any

from langchain_core.messages import AIMessage
from langgraph.config import get_stream_writer
from langgraph.graph import END, START, StateGraph
from langgraph.types import interrupt
from pydantic import BaseModel, ConfigDict
from sqlalchemy import update
from typing_extensions import TypedDict

from deployments.checkpoints import open_checkpointer
from deployments.runner import Runner
from deployments.service import RunRequest
from pbkv_ray.config import RunnerOptions
from pbkv_ray.core.calls import Call, Chunk, Message, Reply
from pbkv_ray.core.events import Event
from pbkv_ray.errors import NotFoundError
from pbkv_ray.store import Store
from pbkv_ray.store.database import Database
from pbkv_ray.store.schema import runs


def request(task: str = "hello", workflow: str = "chain", **given: Any) -> RunRequest:
    return RunRequest(workflow, {"task": task}, **given)


QUICK = RunnerOptions(poll_s=0.02, lease_s=5.0, stop_timeout_s=2.0)


class FakeTransport:
    """Answers `agent:prompt`. A prompt that holds "wait" waits for `let_go` before its answer; all calls are kept."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.aborted: list[str] = []
        self.let_go = asyncio.Event()
        self.waiting = asyncio.Event()

    @property
    def agents(self) -> list[str]:
        return [call.caller.agent for call in self.calls]

    async def stream(self, call: Call) -> AsyncIterator[Chunk]:
        self.calls.append(call)
        prompt = call.messages[-1].content
        try:
            if "wait" in prompt:
                self.waiting.set()
                await self.let_go.wait()
            if "fail" in prompt:
                raise RuntimeError("the node broke")
            text = f"{call.caller.agent}:{prompt}"
            yield Chunk(text, Reply(text, "stop", 10, 2, 4, 1, 0.5, 0.1, "replica-1"))
        except (asyncio.CancelledError, GeneratorExit):
            self.aborted.append(call.caller.agent)
            raise


class State(TypedDict, total=False):
    task: str
    said: Annotated[list[str], operator.add]


class Input(BaseModel):
    model_config = ConfigDict(extra="forbid")
    task: str


@dataclass(frozen=True)
class Spec:
    agents: tuple[str, ...]
    build: Callable[[Any], StateGraph[Any, Any, Any, Any]]
    input_model: type[BaseModel] = Input
    recursion_limit: int = 25


def chain(llm: Any) -> StateGraph[Any, Any, Any, Any]:
    """plan -> write; each says what the LLM answered to the task."""

    async def plan(state: State) -> State:
        return {"said": [await llm.chat([Message("user", "plan")])]}

    async def write(state: State) -> State:
        return {"said": [await llm.chat([Message("user", state["task"])])]}

    graph = StateGraph(State)
    graph.add_node("plan", plan)
    graph.add_node("write", write)
    graph.add_edge(START, "plan")
    graph.add_edge("plan", "write")
    graph.add_edge("write", END)
    return graph


def asking(llm: Any) -> StateGraph[Any, Any, Any, Any]:
    """plan -> a person approves -> write."""

    async def plan(state: State) -> State:
        return {"said": [await llm.chat([Message("user", state["task"])])]}

    def approve(state: State) -> State:
        return {"said": [f"approved:{interrupt({'question': state['task']})}"]}

    graph = StateGraph(State)
    graph.add_node("plan", plan)
    graph.add_node("approve", approve)
    graph.add_edge(START, "plan")
    graph.add_edge("plan", "approve")
    graph.add_edge("approve", END)
    return graph


def talking(llm: Any) -> StateGraph[Any, Any, Any, Any]:
    """speak, which answers with a LangChain message."""

    async def speak(state: State) -> dict[str, Any]:
        text = await llm.chat([Message("user", state["task"])])
        return {"messages": [AIMessage(text, id="message-1")]}

    class Talk(State):
        messages: Annotated[list[Any], operator.add]

    graph = StateGraph(Talk)
    graph.add_node("speak", speak)
    graph.add_edge(START, "speak")
    return graph


def counting(llm: Any) -> StateGraph[Any, Any, Any, Any]:
    """count, which tells every number up to the task's as a custom event."""

    def count(state: State) -> State:
        write = get_stream_writer()
        for number in range(int(state["task"])):
            write({"number": number})
        return {"said": ["counted"]}

    graph = StateGraph(State)
    graph.add_node("count", count)
    graph.add_edge(START, "count")
    return graph


def specs() -> dict[str, Spec]:
    return {
        "chain": Spec(("plan", "write"), chain),
        "asking": Spec(("plan",), asking),
        "talking": Spec(("speak",), talking),
        "counting": Spec((), counting),
    }


@dataclass(frozen=True)
class Registry:
    specs: dict[str, Spec] = field(default_factory=specs)

    def get(self, name: str) -> Spec:
        if name not in self.specs:
            raise NotFoundError(f"workflow {name!r} does not exist")
        return self.specs[name]


class Clock:
    """Starts at a real time, because LangGraph stamps its checkpoints itself; goes on only when told."""

    def __init__(self) -> None:
        self.now = time()

    def __call__(self) -> float:
        return self.now


class Kit:
    """Runners on one store and one clock. `runner()` starts one; leaving the kit closes them all."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.clock = Clock()
        self.transport = FakeTransport()
        self.emitted: list[Event] = []
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> "Kit":
        self.store = await Store.open(self.url, max_events_per_run=40)
        self._stack.push_async_callback(self.store.close)
        self.checkpointer = await self._stack.enter_async_context(open_checkpointer(self.url))
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._stack.aclose()

    async def runner(self, options: RunnerOptions = QUICK, **given: Any) -> Runner:
        made = self.idle_runner(options, **given)
        await made.start()
        self._stack.push_async_callback(made.close)
        return made

    @staticmethod
    async def no_active(runner: Runner) -> None:
        """Waits until the runner has let go of all its runs."""
        await asyncio.gather(*(active.ended.wait() for active in list(runner.active.values())))

    async def forget_the_end(self, run_id: str) -> None:
        """Makes an ended run look as if its runner had died in it."""
        database = Database(self.url)
        async with database.write() as connection:
            past = {"status": "running", "owner": "dead", "lease_until": 0.0, "ended_at": None, "output": None}
            await connection.execute(update(runs).where(runs.c.run_id == run_id).values(**past))
        await database.close()

    def idle_runner(self, options: RunnerOptions = QUICK, **given: Any) -> Runner:
        parts = {"registry": Registry(), "transport": self.transport, "emit": self.emitted.append}
        given = parts | {"clock": self.clock} | given
        return Runner(self.store, self.checkpointer, options=options, **given)

"""The LangGraph shell on real graphs: events in order, whatever way a run ends."""

import asyncio
import contextlib
import operator
from collections.abc import AsyncGenerator
from typing import Annotated, Literal, TypedDict

import pytest
from langchain_core.callbacks import AsyncCallbackHandler
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, StateGraph
from langgraph.types import Command, Send, interrupt
from pydantic import BaseModel, Field

from pbkv_ray.core.calls import Call, Caller, Chunk, Message, Reply
from pbkv_ray.core.events import (
    AgentEntered,
    AgentLeft,
    CallFinished,
    CallStarted,
    Event,
    RunEnded,
    RunStarted,
    ToolWaiting,
)
from pbkv_ray.errors import ConfigError, EngineError
from pbkv_ray.graph.callback import LifecycleCallback
from pbkv_ray.graph.client import LLM
from pbkv_ray.graph.context import RunContext, running

REPLY = Reply("yes", "stop", 10, 2, 4, 1, 0.0, 0.0, "replica-a")


class FakeTransport:
    """Answers every call with `text`; `reached` is set at the `expect`-th call."""

    def __init__(self, text: str = "yes", hang: bool = False, error: Exception | None = None, expect: int = 1) -> None:
        self.text, self.hang, self.error, self.expect = text, hang, error, expect
        self.calls: list[Call] = []
        self.aborted: list[str] = []
        self.reached = asyncio.Event()

    async def stream(self, call: Call) -> AsyncGenerator[Chunk, None]:
        self.calls.append(call)
        if len(self.calls) == self.expect:
            self.reached.set()
        try:
            if self.error is not None:
                raise self.error
            if self.hang:
                await asyncio.Event().wait()
            yield Chunk(self.text)
            yield Chunk("", REPLY)
        except (asyncio.CancelledError, GeneratorExit):
            self.aborted.append(call.call_id)
            raise


class State(TypedDict, total=False):
    said: Annotated[list[str], operator.add]
    tries: int


def ids():
    numbers = iter(range(100))
    return lambda: f"c{next(numbers)}"


def make(transport: FakeTransport, graph_of, agents: tuple[str, ...]):
    events: list[Event] = []
    llm = LLM(transport, events.append, clock=lambda: 0.0, new_id=ids())
    callback = LifecycleCallback("r1", "demo", agents, (("a", "b"),), events.append, clock=lambda: 0.0)
    graph = graph_of(llm).compile(checkpointer=InMemorySaver())
    config = {"callbacks": [callback], "configurable": {"thread_id": "t1"}}

    async def run(state):
        with running(RunContext("r1", "demo", "salt")):
            return await graph.ainvoke(state, config)

    return run, events, callback, graph, config


def ask_then_check(llm: LLM) -> StateGraph:
    async def asker(state: State) -> State:
        return {"said": [await llm.chat([Message("user", "hello")], max_tokens=5)]}

    def checker(state: State) -> State:
        return {"tries": state.get("tries", 0) + 1}

    def again(state: State) -> Literal["asker", "__end__"]:
        return "asker" if state["tries"] < 2 else END

    graph = StateGraph(State)
    graph.add_node("asker", asker)
    graph.add_node("checker", checker)
    graph.add_edge(START, "asker")
    graph.add_edge("asker", "checker")
    graph.add_conditional_edges("checker", again)
    return graph


async def test_who_listens_to_messages_hears_an_agent_as_it_speaks():
    _, _, callback, graph, config = make(FakeTransport("yes"), ask_then_check, ("asker",))
    heard = []
    with running(RunContext("r1", "demo")):
        async for mode, part in graph.astream({"said": []}, config, stream_mode=["messages", "updates"]):
            if mode == "messages":
                message, metadata = part
                heard.append((type(message).__name__, message.content, message.id, metadata["langgraph_node"]))
    assert heard == [("AIMessageChunk", "yes", "c0", "asker"), ("AIMessageChunk", "yes", "c1", "asker")]
    assert callback.ended


async def test_a_tracer_hears_of_prompt_tokens_answer_and_failure():
    seen = []

    class Tracer(AsyncCallbackHandler):
        async def on_chat_model_start(self, serialized, messages, **kwargs):
            seen.append(("start", [(m.type, m.content) for m in messages[0]]))

        async def on_llm_new_token(self, token, **kwargs):
            seen.append(("token", token))

        async def on_llm_end(self, response, **kwargs):
            message = response.generations[0][0].message
            seen.append(("end", message.content, message.usage_metadata["total_tokens"]))

        async def on_llm_error(self, error, **kwargs):
            seen.append(("error", str(error)))

    async def asker(state: State) -> State:
        return {"said": [await llm.chat([Message("system", "Be brief."), Message("user", "hello")])], "tries": 2}

    graph = StateGraph(State)
    graph.add_node("asker", asker)
    graph.add_edge(START, "asker")
    graph.add_edge("asker", END)
    for transport in (FakeTransport("yes"), FakeTransport(error=EngineError("gone"))):
        llm = LLM(transport, lambda event: None)
        with running(RunContext("r1", "demo")), contextlib.suppress(EngineError):
            await graph.compile().ainvoke({"said": []}, {"callbacks": [Tracer()]})
    start = ("start", [("system", "Be brief."), ("human", "hello")])
    assert seen == [start, ("token", "yes"), ("end", "yes", 12), start, ("error", "gone")]


FINISHED = CallFinished("r1", "asker", 1, "c0", 0.0, "stop", 10, 2, 4, 1, 0.0, "replica-a")


async def test_a_loop_of_an_agent_and_a_tool():
    transport = FakeTransport()
    run, events, *_ = make(transport, ask_then_check, ("asker",))
    assert await run({"said": []}) == {"said": ["yes", "yes"], "tries": 2}
    assert events == [
        RunStarted("r1", "demo", 0.0, ("asker",), (("a", "b"),)),
        AgentEntered("r1", "asker", 1, 0.0),
        CallStarted("r1", "asker", 1, "c0", 0.0),
        FINISHED,
        AgentLeft("r1", "asker", 1, 0.0),
        ToolWaiting("r1", "checker", 2, 0.0),
        AgentEntered("r1", "asker", 3, 0.0),
        CallStarted("r1", "asker", 3, "c1", 0.0),
        CallFinished("r1", "asker", 3, "c1", 0.0, "stop", 10, 2, 4, 1, 0.0, "replica-a"),
        AgentLeft("r1", "asker", 3, 0.0),
        ToolWaiting("r1", "checker", 4, 0.0),
        RunEnded("r1", "completed", 0.0),
    ]
    assert transport.calls[0] == Call(
        "c0", Caller("r1", "demo", "asker", 1), (Message("user", "hello"),), max_tokens=5, cache_salt="salt"
    )


async def test_cancelling_in_the_middle_of_a_call_aborts_it_and_ends_the_run():
    transport = FakeTransport(hang=True)
    run, events, *_ = make(transport, ask_then_check, ("asker",))
    task = asyncio.create_task(run({"said": []}))
    await transport.reached.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert transport.aborted == ["c0"]
    assert events[2:] == [
        CallStarted("r1", "asker", 1, "c0", 0.0),
        CallFinished("r1", "asker", 1, "c0", 0.0, "abort"),
        AgentLeft("r1", "asker", 1, 0.0),
        RunEnded("r1", "cancelled", 0.0),
    ]


async def test_an_engine_that_fails_fails_the_run():
    run, events, *_ = make(FakeTransport(error=EngineError("died")), ask_then_check, ("asker",))
    with pytest.raises(EngineError, match="died"):
        await run({"said": []})
    assert events[3:] == [
        CallFinished("r1", "asker", 1, "c0", 0.0, "error"),
        AgentLeft("r1", "asker", 1, 0.0),
        RunEnded("r1", "failed", 0.0),
    ]


def fan_out(llm: LLM) -> StateGraph:
    async def sibling(state: State) -> State:
        return {"said": [await llm.chat([Message("user", "hello")])]}

    graph = StateGraph(State)
    graph.add_node("sibling", sibling)
    graph.add_conditional_edges(START, lambda state: [Send("sibling", state)] * 3, ["sibling"])
    graph.add_edge("sibling", END)
    return graph


async def test_cancelling_parallel_branches_ends_all_of_them_and_the_run_once():
    transport = FakeTransport(hang=True, expect=3)
    run, events, callback, *_ = make(transport, fan_out, ("sibling",))
    task = asyncio.create_task(run({"said": []}))
    await transport.reached.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    callback.finish("failed")  # the runner's own finish comes second and changes nothing
    assert sorted(transport.aborted) == ["c0", "c1", "c2"]
    assert [type(e) for e in events].count(AgentLeft) == 3
    assert [e for e in events if isinstance(e, RunEnded)] == [RunEnded("r1", "cancelled", 0.0)]
    assert isinstance(events[-1], RunEnded)


def with_a_human(llm: LLM) -> StateGraph:
    def human(state: State) -> State:
        return {"said": [interrupt("go on?")]}

    graph = StateGraph(State)
    graph.add_node("human", human)
    graph.add_edge(START, "human")
    return graph


async def test_a_human_interrupt_ends_the_run_as_interrupted_and_can_be_resumed():
    run, events, _, graph, _config = make(FakeTransport(), with_a_human, ())
    await run({"said": []})
    assert events[1:] == [
        ToolWaiting("r1", "human", 1, 0.0),
        ToolWaiting("r1", "interrupt", 0, 0.0),
        RunEnded("r1", "interrupted", 0.0),
    ]
    resumed = await graph.ainvoke(Command(resume="yes"), {"configurable": {"thread_id": "t1"}})
    assert resumed["said"] == ["yes"]


class Verdict(BaseModel):
    ok: bool
    why: str = Field(max_length=20)


async def test_structured_answers_are_constrained_and_parsed():
    llm = LLM(FakeTransport('{"ok": true, "why": "x"}'), lambda event: None)
    with running(RunContext("r1", "demo")):
        assert await llm.structured([Message("user", "?")], Verdict) == Verdict(ok=True, why="x")
        with pytest.raises(EngineError, match=r"no Verdict: '\{\"ok' \(4 characters\); raise max_tokens above 7"):
            await LLM(FakeTransport('{"ok'), lambda event: None).structured([], Verdict, max_tokens=7)


async def test_a_call_outside_a_run_says_so():
    with pytest.raises(ConfigError, match="outside a run"):
        await LLM(FakeTransport(), lambda event: None).chat([])

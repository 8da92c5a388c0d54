"""A workflow for tests: an agent answers, a tool counts, as often as the input says. Sibling branches on request."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, TypedDict

from langgraph.graph import END, START, StateGraph
from pydantic import BaseModel, Field

from pbkv_ray.core.calls import Message
from pbkv_ray.graph.client import LLM
from workflows import registry
from workflows.spec import WorkflowSpec


class EchoInput(BaseModel):
    task: str = Field(max_length=10_000)
    rounds: int = Field(1, ge=1, le=1_000)
    answer_tokens: int = Field(4, ge=1, le=2_000)


class EchoState(TypedDict, total=False):
    task: str
    rounds: int
    answer_tokens: int
    said: str
    done: int


def build(llm: LLM) -> StateGraph[Any, Any, Any, Any]:
    async def speaker(state: EchoState) -> EchoState:
        asked = f"{state['task']}\nRound {state.get('done', 0)}. So far: {state.get('said', '')}"
        answer = await llm.chat([Message("user", asked)], max_tokens=state["answer_tokens"])
        return {"said": (state.get("said", "") + answer)[-200:]}

    def counter(state: EchoState) -> EchoState:
        return {"done": state.get("done", 0) + 1}

    def again(state: EchoState) -> Literal["speaker", "__end__"]:
        return "speaker" if state["done"] < state["rounds"] else END

    graph = StateGraph(EchoState)
    graph.add_node("speaker", speaker)
    graph.add_node("counter", counter)
    graph.add_edge(START, "speaker")
    graph.add_edge("speaker", "counter")
    graph.add_conditional_edges("counter", again)
    return graph


def read(path: Path) -> Iterator[dict[str, Any]]:
    yield from ({"task": line} for line in path.read_text().splitlines())


SPEC = WorkflowSpec(
    name="echo",
    description="Answers and counts.",
    build=build,
    agents=("speaker",),
    input_model=EchoInput,
    samples=lambda: [{"task": "hello", "rounds": 2}],
    read=read,
    recursion_limit=2_100,
)
REGISTRY = {**registry.REGISTRY, SPEC.name: SPEC}

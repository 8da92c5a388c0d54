"""A scripted LLM for the workflow tests, and what runs a graph with it. Never a source of reported numbers."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from langgraph.config import get_config
from langgraph.graph import END, START
from pydantic import BaseModel

from pbkv_ray.core.calls import Message
from workflows.spec import Graph, WorkflowSpec


@dataclass
class FakeLLM:
    """Answers each agent from its list, in order; an answer must fit what the agent asked for.

    A list that is used up repeats its last answer.
    """

    script: dict[str, Sequence[Any]]
    prompts: dict[str, list[list[Message]]] = field(default_factory=dict)

    async def chat(
        self,
        messages: Sequence[Message],
        *,
        schema: type[BaseModel] | None = None,
        regex: str | None = None,
        max_tokens: int = 256,
        temperature: float = 0.0,
    ) -> str:
        agent = get_config()["metadata"]["langgraph_node"]
        asked = self.prompts.setdefault(agent, [])
        answers = self.script[agent]
        answer = answers[min(len(asked), len(answers) - 1)]
        asked.append(list(messages))
        text = answer if isinstance(answer, str) else json.dumps(answer)
        assert (schema is None) != (regex is None), f"{agent} asks without a constraint"
        assert regex is None or re.fullmatch(regex, text), f"{text!r} does not match what {agent} asked for"
        return text

    async def structured(
        self, messages: Sequence[Message], schema: type[BaseModel], *, max_tokens: int = 256
    ) -> BaseModel:
        return schema.model_validate_json(await self.chat(messages, schema=schema, max_tokens=max_tokens))


@dataclass(frozen=True)
class Walk:
    """The graph nodes of a run in order, and its last state."""

    path: tuple[str, ...]
    state: dict[str, Any]

    @property
    def edges(self) -> set[tuple[str, str]]:
        return set(zip((START, *self.path), (*self.path, END), strict=True))


async def walk(spec: WorkflowSpec, llm: Any, data: dict[str, Any], graph: Graph | None = None) -> Walk:
    """Runs the workflow as the runner does: checked input, the spec's recursion limit."""
    app = (graph or spec.build(llm)).compile()
    path: list[str] = []
    state: dict[str, Any] = {}
    config = {"recursion_limit": spec.recursion_limit}
    async for mode, part in app.astream(spec.checked(data), config, stream_mode=["updates", "values"]):
        if mode == "updates":
            path.extend(part)
        else:
            state = part
    return Walk(tuple(path), state)


def all_edges(spec: WorkflowSpec, llm: Any) -> set[tuple[str, str]]:
    """Every edge of the graph, conditional ones included."""
    return {(edge.source, edge.target) for edge in spec.build(llm).compile().get_graph().edges}

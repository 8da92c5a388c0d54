"""How an agent talks to the LLM: prompts that only ever grow at their end, so that their KV cache can be reused.

A prompt is `preamble` (one text a workflow, shared by all runs), then `task` (one text a run, shared by its agents),
then the agent's own earlier turns in this run, then its new request. Nothing that changes comes before what stays.
"""

from collections.abc import Sequence
from typing import Annotated, Final, TypeVar

from pydantic import BaseModel, StringConstraints
from typing_extensions import TypedDict  # pydantic takes typing's own only from Python 3.12 on

from pbkv_ray.core.calls import Message, Role
from pbkv_ray.graph.client import LLM


class Turn(TypedDict):
    """A message as plain data: LangGraph's checkpoints keep it."""

    role: Role
    content: str


Memory = dict[str, list[Turn]]
"""The turns of each agent of one run, by agent."""

T = TypeVar("T", bound=BaseModel)

# One line of text without quotes, backslashes and control characters: a small model under constrained decoding
# can then neither fill it with newlines nor leave the string open. Use this one type everywhere: the grammar compiler
# needs a second for it, once, and shares it between schemas.
Line = Annotated[str, StringConstraints(pattern=r'^[^"\\\x00-\x1f]{1,80}$')]
LINE_TOKENS: Final = 120  # enough for a Line of any text and the JSON around it


def prompt(preamble: str, task: str, turns: Sequence[Turn], request: str) -> list[Message]:
    """The messages of one call. Roles alternate after the system message, as strict chat templates demand."""
    history = [Message(turn["role"], turn["content"]) for turn in turns]
    return [Message("system", preamble), *history, Message("user", _opening(task, turns, request))]


def extended(task: str, turns: Sequence[Turn], request: str, answer: str) -> list[Turn]:
    """The agent's turns after the call, the ones before included."""
    asked = Turn(role="user", content=_opening(task, turns, request))
    return [*turns, asked, Turn(role="assistant", content=answer)]


async def ask(
    llm: LLM,
    agent: str,
    memory: Memory,
    preamble: str,
    task: str,
    request: str,
    schema: type[T],
    max_tokens: int = LINE_TOKENS,
) -> tuple[T, Memory]:
    """Asks for `schema` under constrained decoding; the answer, and the memory with this exchange in it."""
    turns = memory.get(agent, [])
    answer = await llm.structured(prompt(preamble, task, turns, request), schema, max_tokens=max_tokens)
    return answer, {**memory, agent: extended(task, turns, request, answer.model_dump_json())}


def clip(text: str, characters: int) -> str:
    """At most so many characters; says so when it cuts."""
    return text if len(text) <= characters else text[:characters] + "\n[cut]"


def ending(text: str, characters: int) -> str:
    """The last so many characters: where a test run says what failed."""
    return text if len(text) <= characters else "[cut]\n" + text[-characters:]


def _opening(task: str, turns: Sequence[Turn], request: str) -> str:
    return request if turns else f"{task}\n\n{request}"

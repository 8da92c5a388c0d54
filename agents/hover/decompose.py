"""decompose: splits the claim into questions."""

from typing import Annotated

from pydantic import BaseModel, Field

from agents.conversation import LINE_TOKENS, Line, ask
from agents.hover import PREAMBLE, HoverState, task
from pbkv_ray.graph.client import LLM


class Questions(BaseModel):
    questions: Annotated[list[Line], Field(min_length=1, max_length=3)]


async def run(llm: LLM, state: HoverState) -> HoverState:
    """The first agent of a run: it also clears what an earlier run on the same thread left."""
    request = "You are decompose. Write one to three questions."
    answer, memory = await ask(llm, "decompose", {}, PREAMBLE, task(state), request, Questions, 3 * LINE_TOKENS)
    return {
        "questions": list(answer.questions),
        "hop": 0,
        "query": "",
        "seen": [],
        "found": [],
        "notes": [],
        "verdict": "",
        "memory": memory,
    }

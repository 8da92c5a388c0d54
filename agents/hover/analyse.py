"""analyse: notes what the passages just found say about the claim."""

from typing import Literal

from pydantic import BaseModel

from agents.conversation import Line, ask, clip
from agents.hover import PREAMBLE, HoverState, question, task
from pbkv_ray.graph.client import LLM


class Note(BaseModel):
    fact: Line
    relation: Literal["confirms", "contradicts", "unrelated"]


async def run(llm: LLM, state: HoverState) -> HoverState:
    passages = "\n".join(f"[{found['title']}] {clip(found['text'], 600)}" for found in state["found"])
    asked = f"You are analyse. Passages:\n{passages}\nQuestion: {question(state)}\nNote the fact that answers it."
    answer, memory = await ask(llm, "analyse", state["memory"], PREAMBLE, task(state), asked, Note)
    return {"notes": [*state["notes"], f"{answer.fact} ({answer.relation})"], "memory": memory}

"""judge: decides whether what is known supports the part of the claim just looked up. Its verdict is a branch."""

from typing import Literal

from pydantic import BaseModel

from agents.conversation import ask
from agents.hover import PREAMBLE, HoverState, question, task
from pbkv_ray.graph.client import LLM


class Verdict(BaseModel):
    verdict: Literal["SUPPORTED", "NOT_SUPPORTED"]


async def run(llm: LLM, state: HoverState) -> HoverState:
    notes = "\n".join(f"- {note}" for note in state["notes"]) or "- none"
    request = f"You are judge. Question: {question(state)}\nFacts:\n{notes}\nDo they support the claim?"
    answer, memory = await ask(llm, "judge", state["memory"], PREAMBLE, task(state), request, Verdict, 40)
    return {"verdict": answer.verdict, "memory": memory}

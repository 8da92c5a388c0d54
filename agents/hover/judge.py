"""judge: decides whether the notes settle the claim. Its verdict decides the branch."""

from typing import Literal

from pydantic import BaseModel

from agents.conversation import ask
from agents.hover import PREAMBLE, HoverState, task
from pbkv_ray.graph.client import LLM


class Verdict(BaseModel):
    verdict: Literal["SUPPORTED", "NOT_SUPPORTED", "UNSURE"]


class LastVerdict(Verdict):
    """Asked for at the last hop: nothing more can be looked up."""

    verdict: Literal["SUPPORTED", "NOT_SUPPORTED"]


async def run(llm: LLM, state: HoverState) -> HoverState:
    notes = "\n".join(f"- {note}" for note in state["notes"]) or "- none"
    request = f"You are judge. Facts:\n{notes}\nDo the facts settle the claim?"
    schema = Verdict if state["hop"] < state["max_hops"] else LastVerdict
    answer, memory = await ask(llm, "judge", state["memory"], PREAMBLE, task(state), request, schema, max_tokens=40)
    return {"verdict": answer.verdict, "memory": memory}

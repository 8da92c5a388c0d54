"""analyser: says what the coder must change after a failed test."""

from pydantic import BaseModel

from agents.conversation import Line, ask, clip, ending
from agents.swe import PREAMBLE, SweState, task
from pbkv_ray.graph.client import LLM


class Diagnosis(BaseModel):
    change: Line


async def run(llm: LLM, state: SweState) -> SweState:
    code = clip(state["patch"][state["target"]], 2_000)
    request = (
        f"You are analyser. The coder wrote:\n```python\n{code.strip()}\n```\n"
        f"The tests failed: {ending(state['output'], 800)}\nSay what the coder must change."
    )
    answer, memory = await ask(llm, "analyser", state["memory"], PREAMBLE, task(state), request, Diagnosis)
    return {"diagnosis": answer.change, "memory": memory}

"""check: says whether the result can be right."""

from pydantic import BaseModel

from agents.conversation import Line, ask
from agents.finance import PREAMBLE, FinanceState, task
from pbkv_ray.graph.client import LLM


class Check(BaseModel):
    reason: Line
    plausible: bool


async def run(llm: LLM, state: FinanceState) -> FinanceState:
    request = f"You are check. {state['expression']} = {state['result']}\nCan this be the answer?"
    answer, memory = await ask(llm, "check", state["memory"], PREAMBLE, task(state), request, Check)
    return {"concern": answer.reason, "plausible": answer.plausible, "memory": memory}

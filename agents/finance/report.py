"""report: writes the answer."""

from pydantic import BaseModel

from agents.conversation import Line, ask
from agents.finance import PREAMBLE, FinanceState, task
from pbkv_ray.graph.client import LLM


class Answer(BaseModel):
    answer: Line


async def run(llm: LLM, state: FinanceState) -> FinanceState:
    doubt = "" if state["plausible"] else f"\nThe check doubts it: {state['concern']}"
    request = f"You are report. {state['expression']} = {state['result']}{doubt}\nWrite the answer."
    answer, memory = await ask(llm, "report", state["memory"], PREAMBLE, task(state), request, Answer)
    return {"answer": answer.answer, "memory": memory}

"""compute: writes the arithmetic expression; a tool evaluates it."""

from typing import Annotated

from pydantic import BaseModel, StringConstraints

from agents.conversation import ask
from agents.finance import PREAMBLE, FinanceState, task
from pbkv_ray.graph.client import LLM

Arithmetic = Annotated[str, StringConstraints(pattern=r"^[0-9.+*/() -]{1,60}$")]


class Expression(BaseModel):
    expression: Arithmetic


async def run(llm: LLM, state: FinanceState) -> FinanceState:
    figures = ", ".join(f"{figure['name']} = {figure['value']}" for figure in state["figures"])
    request = f"You are compute. Figures: {figures}\nWrite the expression."
    answer, memory = await ask(
        llm, "compute", state["memory"], PREAMBLE, task(state), request, Expression, max_tokens=100
    )
    return {"expression": answer.expression, "memory": memory}

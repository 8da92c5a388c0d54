"""compute: writes the arithmetic expression; a tool evaluates it."""

from typing import Annotated

from pydantic import BaseModel, StringConstraints

from agents.conversation import ask
from agents.finance import PREAMBLE, FinanceState, task
from pbkv_ray.graph.client import LLM

# Two to four numbers with operators between them: a small model left free here never stops.
_NUMBER = r"\(?[0-9]{1,9}(\.[0-9]{1,3})?\)?"
Arithmetic = Annotated[str, StringConstraints(pattern=rf"^{_NUMBER}( [-+*/] {_NUMBER}){{1,3}}$")]


class Expression(BaseModel):
    expression: Arithmetic


async def run(llm: LLM, state: FinanceState) -> FinanceState:
    figures = ", ".join(f"{figure['name']} = {figure['value']}" for figure in state["figures"])
    request = f"You are compute. Figures: {figures}\nWrite the expression."
    answer, memory = await ask(llm, "compute", state["memory"], PREAMBLE, task(state), request, Expression)
    return {"expression": answer.expression, "memory": memory}

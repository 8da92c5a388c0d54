"""extract: copies the figures that the question needs."""

from typing import Annotated

from pydantic import BaseModel, Field, StringConstraints

from agents.conversation import LINE_TOKENS, Line, ask
from agents.finance import PREAMBLE, FinanceState, task
from pbkv_ray.graph.client import LLM

Number = Annotated[str, StringConstraints(pattern=r"^-?[0-9]{1,12}(\.[0-9]{1,4})?$")]


class NamedFigure(BaseModel):
    name: Line
    value: Number


class Figures(BaseModel):
    figures: Annotated[list[NamedFigure], Field(min_length=1, max_length=3)]


async def run(llm: LLM, state: FinanceState) -> FinanceState:
    """The first agent of a run: it also clears what an earlier run on the same thread left."""
    request = "You are extract. Copy one to three figures."
    answer, memory = await ask(llm, "extract", {}, PREAMBLE, task(state), request, Figures, 3 * LINE_TOKENS)
    return {
        "figures": [{"name": figure.name, "value": figure.value} for figure in answer.figures],
        "expression": "",
        "result": "",
        "plausible": False,
        "concern": "",
        "answer": "",
        "memory": memory,
    }

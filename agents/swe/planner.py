"""planner: chooses the file to change and says what is wrong."""

from typing import Any, Literal

from pydantic import BaseModel, create_model

from agents.conversation import Line, ask
from agents.swe import PREAMBLE, SweState, task
from pbkv_ray.graph.client import LLM


class Plan(BaseModel):
    wrong: Line


class FilePlan(Plan):
    file: str


def _choosing(paths: tuple[str, ...]) -> type[FilePlan]:
    """FilePlan whose `file` can only be one of `paths`: the LLM cannot name a file that does not exist."""
    choice: Any = Literal.__getitem__(paths)
    return create_model("FilePlan", __base__=FilePlan, file=(choice, ...))


async def run(llm: LLM, state: SweState) -> SweState:
    """The first agent of a run: it also clears what an earlier run on the same thread left."""
    paths = tuple(state["files"])
    schema = _choosing(paths) if len(paths) > 1 else Plan
    request = "You are planner. Say what is wrong."
    answer, memory = await ask(llm, "planner", {}, PREAMBLE, task(state), request, schema)
    return {
        "plan": answer.wrong,
        "target": answer.file if isinstance(answer, FilePlan) else next(iter(paths), ""),
        "patch": {},
        "tries": 0,
        "exit_code": -1,
        "output": "",
        "report": "",
        "diagnosis": "",
        "message": "",
        "memory": memory,
    }

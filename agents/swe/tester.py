"""tester: says what the tests showed. pytest has run already; its exit code, not the LLM, decides the branch."""

from pydantic import BaseModel

from agents.conversation import Line, ask, ending
from agents.swe import PREAMBLE, SweState, task
from pbkv_ray.graph.client import LLM


class Report(BaseModel):
    report: Line


async def run(llm: LLM, state: SweState) -> SweState:
    outcome = "The tests passed." if state["exit_code"] == 0 else "The tests failed."
    request = f"You are tester. {outcome}\n{ending(state['output'], 800)}\nReport it."
    answer, memory = await ask(llm, "tester", state["memory"], PREAMBLE, task(state), request, Report)
    return {"report": answer.report, "memory": memory}

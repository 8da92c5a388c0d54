"""committer: describes the change that passed the tests."""

from pydantic import BaseModel

from agents.conversation import Line, ask
from agents.swe import PREAMBLE, SweState, task
from pbkv_ray.graph.client import LLM


class Commit(BaseModel):
    subject: Line


async def run(llm: LLM, state: SweState) -> SweState:
    code = state["patch"][state["target"]].strip()
    request = f"You are committer. The new file:\n```python\n{code}\n```\nWrite the commit's line."
    answer, memory = await ask(llm, "committer", state["memory"], PREAMBLE, task(state), request, Commit)
    return {"message": answer.subject, "memory": memory}

"""query: writes the words to search for, for one question a hop."""

from pydantic import BaseModel

from agents.conversation import Line, ask
from agents.hover import PREAMBLE, HoverState, task
from pbkv_ray.graph.client import LLM


class Query(BaseModel):
    words: Line


async def run(llm: LLM, state: HoverState) -> HoverState:
    questions, hop = state["questions"], state["hop"]
    known = state["notes"][-1] if state["notes"] else "nothing yet"
    request = f"You are query. Known: {known}\nQuestion: {questions[hop % len(questions)]}\nWrite the search words."
    answer, memory = await ask(llm, "query", state["memory"], PREAMBLE, task(state), request, Query, max_tokens=120)
    return {"query": answer.words, "hop": hop + 1, "memory": memory}

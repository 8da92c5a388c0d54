"""query: takes the next question and writes the words to search for."""

from pydantic import BaseModel

from agents.conversation import Line, ask
from agents.hover import PREAMBLE, HoverState, question, task
from pbkv_ray.graph.client import LLM


class Query(BaseModel):
    words: Line


async def run(llm: LLM, state: HoverState) -> HoverState:
    hop = state["hop"] + 1
    known = state["notes"][-1] if state["notes"] else "nothing yet"
    asked = question({**state, "hop": hop})
    request = f"You are query. Known: {known}\nQuestion: {asked}\nWrite the search words."
    answer, memory = await ask(llm, "query", state["memory"], PREAMBLE, task(state), request, Query)
    return {"query": answer.words, "hop": hop, "memory": memory}

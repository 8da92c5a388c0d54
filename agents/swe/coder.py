"""coder: writes the whole corrected file."""

from typing import Final

from agents.conversation import extended, prompt
from agents.swe import PREAMBLE, SweState, task
from pbkv_ray.graph.client import LLM

# A code block and nothing else. What max_tokens cuts is taken as it is: the tests will say so.
_OPENING: Final = "```python\n"
_CODE_BLOCK: Final = _OPENING + "[^`]+\n```"


async def run(llm: LLM, state: SweState) -> SweState:
    wrong = state["diagnosis"] or state["plan"]
    request = f"You are coder. What is wrong: {wrong}\nWrite the whole corrected file {state['target']}."
    turns = state["memory"].get("coder", [])
    messages = prompt(PREAMBLE, task(state), turns, request)
    answer = await llm.chat(messages, regex=_CODE_BLOCK, max_tokens=400)
    return {
        "patch": {**state["patch"], state["target"]: _code(answer)},
        "tries": state["tries"] + 1,
        "memory": {**state["memory"], "coder": extended(task(state), turns, request, answer)},
    }


def _code(answer: str) -> str:
    return answer.removeprefix(_OPENING).partition("```")[0]

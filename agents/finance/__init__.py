"""What the agents of `finance` share: the state of a run and the start of every prompt."""

from typing_extensions import TypedDict

from agents.conversation import Memory, clip

PREAMBLE = """\
You are one of four agents that answer a question about a company from its filings, one after the other.

extract copies the figures that the question needs from the filing, each with its name.
compute writes one arithmetic expression that gives the answer from these figures. A calculator evaluates it.
check compares the result with the filing and says whether it can be right.
report writes the answer in one sentence.

The rules for all agents:
- Use the figures of the filing only, as they are written there. Do not use what you remember.
- Leave out currency signs and thousands separators. Figures in brackets are negative.
- A margin is a part divided by the whole. Growth is the new figure minus the old one, divided by the old one.
- Answer with the JSON object that is asked for and nothing else. Keep every text short.

An example. Filing: Net sales were 200 in 2021 and 150 in 2020.
Question: How much did sales grow in 2021?
extract: {"figures": [{"name": "net sales 2021", "value": "200"}, {"name": "net sales 2020", "value": "150"}]}
compute: {"expression": "(200 - 150) / 150"}
The calculator: 0.333333
check: {"reason": "Sales rose by a third of 150.", "plausible": true}
report: {"answer": "Sales grew by 33 percent in 2021."}"""


class Figure(TypedDict):
    name: str
    value: str


class FinanceState(TypedDict, total=False):
    """`company`, `question` and `excerpts` are the input; `answer` is the result."""

    company: str
    question: str
    excerpts: list[str]
    figures: list[Figure]
    expression: str
    result: str  # the value, or why there is none
    plausible: bool
    concern: str
    answer: str
    memory: Memory


def task(state: FinanceState) -> str:
    """The excerpts come before the question: questions on the same filing share their cache."""
    filing = clip("\n\n".join(excerpt.strip() for excerpt in state["excerpts"]), 8_000)
    return f"The filing of {state['company']}:\n{filing}\n\nQuestion: {state['question']}"

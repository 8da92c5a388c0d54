"""What the agents of `hover` share: the state of a run and the start of every prompt."""

from typing_extensions import TypedDict

from agents.conversation import Memory

PREAMBLE = """\
You are one of four agents that check a claim against an encyclopedia, one after the other.

decompose splits the claim into the questions that must be answered, one fact each, in order.
query writes the words to search for. Good words are the names of people, places and works, not whole sentences.
analyse reads the passages that were found and notes the one fact in them that answers the question.
judge compares the facts with the claim. A part of the claim that no fact confirms is not supported.

The rules for all agents:
- Use the passages only. Do not use what you remember.
- A name in the claim and a name in a passage are the same only when they are spelled the same.
- One wrong year, place or name makes the whole claim wrong.
- Answer with the JSON object that is asked for and nothing else. Keep every text short.

An example. Claim: The bridge over the river Lomm was built by an engineer who was born in Pell.
decompose: {"questions": ["Who built the bridge over the river Lomm?", "Where was that engineer born?"]}
query: {"words": "bridge river Lomm engineer"}
analyse: {"fact": "The bridge over the Lomm was built by Tor Aske.", "relation": "confirms"}
judge: {"verdict": "SUPPORTED"}
query: {"words": "Tor Aske born"}
analyse: {"fact": "Tor Aske was born in Dunn.", "relation": "contradicts"}
judge: {"verdict": "NOT_SUPPORTED"}"""


class Passage(TypedDict):
    title: str
    text: str


class HoverState(TypedDict, total=False):
    """`claim` and `max_hops` are the input; `verdict` is the result."""

    claim: str
    max_hops: int
    questions: list[str]
    hop: int  # the question that is looked up, counted from 1
    query: str
    seen: list[str]  # titles of the passages found so far
    found: list[Passage]  # the passages of the last search that were not seen before
    notes: list[str]
    verdict: str
    memory: Memory


def task(state: HoverState) -> str:
    return f"Claim: {state['claim']}"


def question(state: HoverState) -> str:
    """The question of the current hop."""
    return state["questions"][state["hop"] - 1]

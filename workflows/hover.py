"""hover: checks a claim against a corpus, one question a hop, until a part is refuted or all are supported."""

import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

from langgraph.graph import START, StateGraph
from pydantic import BaseModel, ConfigDict, Field

from agents.hover import HoverState, analyse, decompose, judge, query
from pbkv_ray.graph.client import LLM
from workflows.records import SAMPLES, field, records
from workflows.spec import Graph, Json, WorkflowSpec
from workflows.tools.corpus import Corpus


class HoverInput(BaseModel):
    model_config = ConfigDict(extra="forbid")

    claim: Annotated[str, Field(min_length=1, max_length=2_000)]
    max_hops: Annotated[int, Field(ge=1, le=8)] = 3


def build(llm: LLM) -> Graph:
    """PBKV_HOVER_CORPUS names the corpus, a folder or a file; without it the shipped one is used."""
    corpus = Corpus.load(Path(os.environ.get("PBKV_HOVER_CORPUS") or SAMPLES / "hover" / "corpus"))
    graph = StateGraph(HoverState)
    graph.add_node("decompose", partial(decompose.run, llm))
    graph.add_node("query", partial(query.run, llm))
    graph.add_node("retrieve", partial(retrieve, corpus))
    graph.add_node("analyse", partial(analyse.run, llm))
    graph.add_node("judge", partial(judge.run, llm))
    graph.add_edge(START, "decompose")
    graph.add_edge("decompose", "query")
    graph.add_edge("query", "retrieve")
    graph.add_conditional_edges("retrieve", after_retrieve)
    graph.add_edge("analyse", "judge")
    graph.add_conditional_edges("judge", after_judge)
    return graph


async def retrieve(corpus: Corpus, state: HoverState) -> HoverState:
    """A tool: the two best passages for the query that this run has not seen yet."""
    found = await corpus.search(state["query"], count=2, without=state["seen"])
    return {"found": found, "seen": [*state["seen"], *(passage["title"] for passage in found)]}


def after_retrieve(state: HoverState) -> Literal["analyse", "judge"]:
    return "analyse" if state["found"] else "judge"


def after_judge(state: HoverState) -> Literal["query", "__end__"]:
    """One part that is not supported settles the claim; it is supported when all its parts are."""
    last = state["hop"] >= min(len(state["questions"]), state["max_hops"])
    return "query" if state["verdict"] == "SUPPORTED" and not last else "__end__"


def read(path: Path) -> Iterator[Json]:
    """HoVer's own files: a list of {uid, claim, supporting_facts, label, num_hops}, or such objects as JSON lines."""
    for record in records(path):
        yield {"claim": field(record, "claim", path)}


def samples() -> list[Json]:
    return list(read(SAMPLES / "hover" / "claims.json"))


SPEC = WorkflowSpec(
    name="hover",
    description="Checks a claim in several hops over a corpus (HoVer).",
    build=build,
    agents=("decompose", "query", "analyse", "judge"),
    input_model=HoverInput,
    samples=samples,
    read=read,
    recursion_limit=50,
)

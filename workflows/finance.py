"""finance: answers a question from filing excerpts. The graph has no branch."""

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Annotated

from langgraph.graph import END, START, StateGraph
from pydantic import BaseModel, ConfigDict, Field

from agents.finance import FinanceState, check, compute, extract, report
from pbkv_ray.errors import InputError
from pbkv_ray.graph.client import LLM
from workflows.records import SAMPLES, field, records
from workflows.spec import Graph, Json, WorkflowSpec
from workflows.tools.arithmetic import evaluate

Excerpt = Annotated[str, Field(max_length=60_000)]


class FinanceInput(BaseModel):
    model_config = ConfigDict(extra="forbid")

    company: Annotated[str, Field(min_length=1, max_length=200)]
    question: Annotated[str, Field(min_length=1, max_length=2_000)]
    excerpts: Annotated[list[Excerpt], Field(min_length=1, max_length=20)]


def build(llm: LLM) -> Graph:
    graph = StateGraph(FinanceState)
    graph.add_node("extract", partial(extract.run, llm))
    graph.add_node("compute", partial(compute.run, llm))
    graph.add_node("calculate", calculate)
    graph.add_node("check", partial(check.run, llm))
    graph.add_node("report", partial(report.run, llm))
    for source, target in (
        (START, "extract"),
        ("extract", "compute"),
        ("compute", "calculate"),
        ("calculate", "check"),
        ("check", "report"),
        ("report", END),
    ):
        graph.add_edge(source, target)
    return graph


def calculate(state: FinanceState) -> FinanceState:
    """A tool: the value of the expression, or why there is none; the agents after it read either."""
    try:
        return {"result": f"{evaluate(state['expression']):.6g}"}
    except InputError as error:
        return {"result": f"no result ({error})"}


def read(path: Path) -> Iterator[Json]:
    """FinanceBench's JSON lines: {company, question, evidence: [{evidence_text}]}; others are refused."""
    for record in records(path):
        evidence = record.get("evidence")
        if not isinstance(evidence, list) or not evidence:
            raise InputError(f"a record of {path} has no evidence: {json.dumps(record)[:80]}")
        yield {
            "company": field(record, "company", path),
            "question": field(record, "question", path),
            "excerpts": [field(item, "evidence_text", path) for item in evidence],
        }


def samples() -> list[Json]:
    return list(read(SAMPLES / "finance" / "questions.jsonl"))


SPEC = WorkflowSpec(
    name="finance",
    description="Answers a question about a company from its filings (FinanceBench).",
    build=build,
    agents=("extract", "compute", "check", "report"),
    input_model=FinanceInput,
    samples=samples,
    read=read,
    recursion_limit=20,
)

"""finance: one way through the graph, and arithmetic that executes nothing else."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pbkv_ray.errors import InputError
from tests.workflows.fakes import FakeLLM, all_edges, walk
from workflows import finance
from workflows.tools.arithmetic import evaluate

QUESTION = {"company": "Orvane", "question": "How much did revenue grow?", "excerpts": ["480 after 400."]}


def scripted(expression: str, plausible: bool = True) -> FakeLLM:
    return FakeLLM(
        {
            "extract": [{"figures": [{"name": "new", "value": "480"}, {"name": "old", "value": "400"}]}],
            "compute": [{"expression": expression}],
            "check": [{"reason": "it is a share", "plausible": plausible}],
            "report": [{"answer": "Revenue grew by 20 percent."}],
        }
    )


async def test_a_question_is_answered_by_four_agents_and_a_calculator() -> None:
    llm = scripted("(480 - 400) / 400")
    run = await walk(finance.SPEC, llm, QUESTION)
    assert run.path == ("extract", "compute", "calculate", "check", "report")
    assert (run.state["result"], run.state["answer"]) == ("0.2", "Revenue grew by 20 percent.")
    assert "Figures: new = 480, old = 400" in llm.prompts["compute"][0][-1].content
    assert run.edges == all_edges(finance.SPEC, None)


async def test_an_expression_without_a_value_does_not_stop_the_run() -> None:
    llm = scripted("480 / (400 - 400)", plausible=False)
    run = await walk(finance.SPEC, llm, QUESTION)
    assert run.state["result"] == "no result ('480 / (400 - 400)' divides by zero)"
    assert "The check doubts it: it is a share" in llm.prompts["report"][0][-1].content


async def test_a_long_filing_is_cut_and_says_so() -> None:
    llm = scripted("1 + 1")
    await walk(finance.SPEC, llm, {**QUESTION, "excerpts": ["x" * 30_000]})
    content = llm.prompts["extract"][0][1].content
    assert "[cut]" in content
    assert len(content) < 9_000
    assert content.index("[cut]") < content.index("Question:")


@pytest.mark.parametrize(
    ("expression", "value"),
    [("(480 - 400) / 400", 0.2), ("-3 + 5", 2.0), ("2*3.5", 7.0), ("--2", 2.0), ("0.5", 0.5)],
)
def test_arithmetic_has_its_value(expression: str, value: float) -> None:
    assert evaluate(expression) == pytest.approx(value)


@pytest.mark.parametrize(
    "expression",
    [
        "",
        "1 +",
        "2 ** 99999",
        "10 // 3",
        "__import__('os')",
        "a",
        "True",
        "'a' * 3",
        "1/0",
        "1e308 * 10",
        "(" * 150 + "1",
        "1" * 201,
        "007",
        "3j",
        "[1][0]",
    ],
)
def test_what_is_no_plain_finite_arithmetic_is_refused(expression: str) -> None:
    with pytest.raises(InputError):
        evaluate(expression)


@given(st.text(alphabet="0123456789.+-*/() e_", max_size=80))
def test_any_text_has_a_finite_value_or_is_refused(text: str) -> None:
    try:
        value = evaluate(text)
    except InputError:
        return
    assert abs(value) < float("inf")


def test_financebench_lines_are_read(tmp_path) -> None:
    file = tmp_path / "financebench_open_source.jsonl"
    record = {
        "financebench_id": "1",
        "company": "3M",
        "question": "What?",
        "answer": "1",
        "evidence": [{"evidence_text": "page one", "doc_name": "x"}, {"evidence_text": "page two"}],
    }
    file.write_text(json.dumps(record) + "\n\n")
    assert list(finance.read(file)) == [{"company": "3M", "question": "What?", "excerpts": ["page one", "page two"]}]


def test_a_line_without_evidence_is_refused(tmp_path) -> None:
    file = tmp_path / "bad.jsonl"
    file.write_text('{"company": "A", "question": "B"}\n')
    with pytest.raises(InputError, match="has no evidence"):
        list(finance.read(file))

"""hover: the judge, the retriever and the number of questions decide the way; the hop limit ends it."""

import gzip
import json

import pytest

from pbkv_ray.errors import ConfigError, InputError
from tests.workflows.fakes import FakeLLM, all_edges, walk
from workflows import hover

FACT = {"fact": "The Torl Bridge was built by Ana Keld.", "relation": "confirms"}
CLAIM = {"claim": "The Torl Bridge was built by an engineer from Oster.", "max_hops": 3}
FIRST_HOP = ("decompose", "query", "retrieve", "analyse", "judge")


def scripted(verdicts: list[str], searches: list[str]) -> FakeLLM:
    return FakeLLM(
        {
            "decompose": [{"questions": ["Who built the bridge?", "Where was the builder born?"]}],
            "query": [{"words": words} for words in searches],
            "analyse": [FACT],
            "judge": [{"verdict": verdict} for verdict in verdicts],
        }
    )


async def test_a_refuted_part_ends_the_run_after_one_hop() -> None:
    run = await walk(hover.SPEC, scripted(["NOT_SUPPORTED"], ["Torl Bridge"]), CLAIM)
    assert run.path == FIRST_HOP
    assert run.state["verdict"] == "NOT_SUPPORTED"
    assert run.state["notes"] == ["The Torl Bridge was built by Ana Keld. (confirms)"]
    assert run.state["seen"] == ["Torl Bridge", "Ana Keld"]


async def test_a_supported_part_leads_to_the_next_question() -> None:
    llm = scripted(["SUPPORTED", "SUPPORTED"], ["Torl Bridge", "Silver Heron captain"])
    run = await walk(hover.SPEC, llm, CLAIM)
    assert run.path == (*FIRST_HOP, "query", "retrieve", "analyse", "judge")
    assert [messages[-1].content.split("\n")[-2] for messages in llm.prompts["query"]] == [
        "Question: Who built the bridge?",
        "Question: Where was the builder born?",
    ]
    assert run.state["verdict"] == "SUPPORTED"


async def test_a_search_that_finds_nothing_new_goes_to_the_judge() -> None:
    run = await walk(hover.SPEC, scripted(["SUPPORTED"], ["Torl Bridge"]), CLAIM)
    assert run.path == (*FIRST_HOP, "query", "retrieve", "judge")
    assert len(run.state["notes"]) == 1


async def test_the_hop_limit_ends_the_run_before_its_last_question() -> None:
    run = await walk(hover.SPEC, scripted(["SUPPORTED"], ["Torl Bridge"]), {**CLAIM, "max_hops": 1})
    assert run.path == FIRST_HOP
    assert len(run.state["questions"]) == 2


async def test_these_stories_take_every_edge() -> None:
    runs = [await walk(hover.SPEC, scripted([word], ["Torl Bridge"]), CLAIM) for word in ("SUPPORTED", "NOT_SUPPORTED")]
    assert set().union(*(run.edges for run in runs)) == all_edges(hover.SPEC, None)


async def test_a_second_run_on_the_same_state_starts_afresh() -> None:
    llm = scripted(["SUPPORTED"], ["Torl Bridge"])
    first = await walk(hover.SPEC, llm, CLAIM)
    second = await hover.SPEC.build(llm).compile().ainvoke(first.state)
    assert second == first.state


async def test_every_prompt_of_an_agent_continues_its_last_one() -> None:
    searches = ["Torl Bridge", "Silver Heron", "Otto Marn"]
    llm = scripted(["SUPPORTED"], searches)
    llm.script["decompose"] = [{"questions": searches}]
    await walk(hover.SPEC, llm, CLAIM)
    for agent in ("query", "analyse", "judge"):
        for before, after in zip(llm.prompts[agent], llm.prompts[agent][1:], strict=False):
            assert after[: len(before)] == before
            assert [message.role for message in after[len(before) :]] == ["assistant", "user"]
    assert [len(llm.prompts[agent]) for agent in ("query", "analyse", "judge")] == [3, 3, 3]
    starts = {(prompts[0][0], prompts[0][1].content.split("\n")[0]) for prompts in llm.prompts.values()}
    assert len(starts) == 1, "all agents of a run share the preamble and the claim"


def test_hovers_own_file_is_read(tmp_path) -> None:
    file = tmp_path / "hover_dev_release_v1.1.json"
    record = {"uid": "1", "claim": "A.", "supporting_facts": [["A", 0]], "label": "SUPPORTED", "num_hops": 2}
    file.write_text(json.dumps([record, {**record, "claim": "B."}]))
    assert list(hover.read(file)) == [{"claim": "A."}, {"claim": "B."}]


def test_a_file_of_something_else_is_refused(tmp_path) -> None:
    file = tmp_path / "other.json"
    file.write_text(json.dumps([{"question": "?"}]))
    with pytest.raises(InputError, match="no text 'claim'; it has question"):
        list(hover.read(file))


def test_a_corpus_folder_without_passages_is_refused(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("PBKV_HOVER_CORPUS", str(tmp_path))
    with pytest.raises(ConfigError, match="holds no passages"):
        hover.build(None)


async def test_a_corpus_folder_of_texts_is_searched(tmp_path, monkeypatch) -> None:
    (tmp_path / "a.txt").write_text("Rill\n\nThe Rill is a stream.")
    (tmp_path / "b.txt").write_text("Moor\nThe Moor is a heath.")
    monkeypatch.setenv("PBKV_HOVER_CORPUS", str(tmp_path))
    run = await walk(hover.SPEC, scripted(["NOT_SUPPORTED"], ["stream"]), CLAIM)
    assert run.state["found"] == [{"title": "Rill", "text": "The Rill is a stream."}]


async def test_a_corpus_may_be_one_file(tmp_path, monkeypatch) -> None:
    with gzip.open(tmp_path / "wiki.jsonl.gz", "wt") as file:
        file.write(json.dumps({"title": "Rill", "text": "The Rill is a stream."}) + "\n")
    monkeypatch.setenv("PBKV_HOVER_CORPUS", str(tmp_path / "wiki.jsonl.gz"))
    run = await walk(hover.SPEC, scripted(["NOT_SUPPORTED"], ["stream"]), CLAIM)
    assert run.state["found"] == [{"title": "Rill", "text": "The Rill is a stream."}]

"""swe: pytest's exit code decides the way, the retry limit ends it."""

import json

import pytest

from pbkv_ray.errors import InputError, NotFoundError
from tests.workflows.fakes import FakeLLM, Walk, all_edges, walk
from workflows import swe

WRONG = "```python\ndef add(a, b):\n    return a - b\n```"
RIGHT = "```python\ndef add(a, b):\n    return a + b\n```"
EXERCISE = {
    "statement": "add(2, 3) returns -1",
    "files": {"calc.py": "def add(a, b):\n    return a - b\n"},
    "tests": {"test_calc.py": "from calc import add\n\ndef test_add():\n    assert add(2, 3) == 5\n"},
    "max_tries": 2,
}
TRY = ("coder", "pytest", "tester")


def scripted(*codes: str, plan: dict[str, str] | None = None) -> FakeLLM:
    return FakeLLM(
        {
            "planner": [plan or {"wrong": "It subtracts."}],
            "coder": codes,
            "tester": [{"report": "As pytest says."}],
            "analyser": [{"change": "Use plus."}],
            "committer": [{"subject": "Add in add"}],
        }
    )


async def solve(llm: FakeLLM, data: dict[str, object] = EXERCISE) -> Walk:
    return await walk(swe.SPEC, llm, data)


async def test_code_that_passes_is_committed() -> None:
    run = await solve(scripted(RIGHT))
    assert run.path == ("open", "planner", *TRY, "committer")
    assert (run.state["exit_code"], run.state["output"].splitlines()[-1]) == (0, "1 passed")
    assert run.state["message"] == "Add in add"
    assert run.state["patch"] == {"calc.py": "def add(a, b):\n    return a + b\n"}


async def test_code_that_fails_is_analysed_and_written_again() -> None:
    llm = scripted(WRONG, RIGHT)
    run = await solve(llm)
    assert run.path == ("open", "planner", *TRY, "analyser", *TRY, "committer")
    assert "assert -1 == 5" in llm.prompts["analyser"][0][-1].content
    assert "What is wrong: Use plus." in llm.prompts["coder"][1][-1].content


async def test_the_retry_limit_ends_the_run_without_a_commit() -> None:
    run = await solve(scripted(WRONG))
    assert run.path == ("open", "planner", *TRY, "analyser", *TRY)
    assert (run.state["tries"], run.state["exit_code"], run.state["message"]) == (2, 1, "")


async def test_a_statement_without_code_ends_with_the_plan() -> None:
    run = await solve(scripted(), {"statement": "The separability matrix is wrong."})
    assert run.path == ("open", "planner")
    assert run.state["plan"] == "It subtracts."


async def test_these_stories_take_every_edge() -> None:
    runs = [await solve(scripted(WRONG, RIGHT)), await solve(scripted(WRONG), {**EXERCISE, "max_tries": 1})]
    runs.append(await solve(scripted(), {"statement": "x"}))
    assert set().union(*(run.edges for run in runs)) == all_edges(swe.SPEC, None)


async def test_of_several_files_the_planner_chooses_one_by_name() -> None:
    data = {**EXERCISE, "files": {**EXERCISE["files"], "other.py": "X = 1\n"}}
    run = await solve(scripted(RIGHT, plan={"wrong": "It subtracts.", "file": "calc.py"}), data)
    assert (run.state["target"], run.state["exit_code"]) == ("calc.py", 0)
    with pytest.raises(ValueError, match=r"'calc\.py' or 'other\.py'"):
        await solve(scripted(RIGHT, plan={"wrong": "It subtracts.", "file": "../../etc/passwd"}), data)


@pytest.mark.parametrize(
    ("body", "exit_code", "says"),
    [
        ("def add(a, b:\n", 2, "SyntaxError"),
        ("import os\nos._exit(0)\n", 123, "pytest ended without a result"),
        ("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n", 137, ""),
        ("def other():\n    return 0\n", 2, "ImportError"),
    ],
)
async def test_code_that_breaks_the_test_run_counts_as_failed(body: str, exit_code: int, says: str) -> None:
    run = await solve(scripted(f"```python\n{body}\n```"), {**EXERCISE, "max_tries": 1})
    assert run.state["exit_code"] == exit_code
    assert says in run.state["output"]


async def test_the_same_failure_gives_the_same_prompts_again() -> None:
    first, second = scripted(WRONG), scripted(WRONG)
    await solve(first)
    await solve(second)
    assert first.prompts == second.prompts


async def test_every_prompt_of_an_agent_continues_its_last_one() -> None:
    llm = scripted(WRONG)
    await solve(llm)
    for agent in ("coder", "tester"):
        before, after = llm.prompts[agent]
        assert after[: len(before)] == before
    starts = {prompts[0][1].content.partition("\n\nYou are")[0] for prompts in llm.prompts.values()}
    assert len(starts) == 1, "all agents of a run share the statement and the files"


async def test_a_checkout_is_patched_in_a_copy(tmp_path, monkeypatch) -> None:
    source = tmp_path / "calc-1.0" / "src"
    source.mkdir(parents=True)
    (source / "calc.py").write_text("def add(a, b):\n    return a - b\n")
    (tmp_path / "calc-1.0" / "test_calc.py").write_text(
        "from src.calc import add\n\ndef test_add():\n    assert add(2, 3) == 5\n"
    )
    monkeypatch.setenv("PBKV_CHECKOUTS", str(tmp_path))
    data = {
        "statement": "add is wrong",
        "checkout": "calc-1.0",
        "targets": ["src/calc.py"],
        "test_paths": ["test_calc.py"],
    }
    run = await solve(scripted(RIGHT), data)
    assert run.state["exit_code"] == 0
    assert (source / "calc.py").read_text() == "def add(a, b):\n    return a - b\n"


async def test_only_checkouts_of_the_servers_owner_are_opened(tmp_path, monkeypatch) -> None:
    data = {"statement": "x", "checkout": "secret", "targets": ["a.py"], "test_paths": ["test_a.py"]}
    with pytest.raises(InputError, match="needs PBKV_CHECKOUTS"):
        await solve(scripted(RIGHT), data)
    root = tmp_path / "checkouts"
    root.mkdir()
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "a.py").write_text("KEY = 1")
    (root / "secret").symlink_to(outside)
    (root / "open").mkdir()
    (root / "open" / "a.py").symlink_to(outside / "a.py")
    monkeypatch.setenv("PBKV_CHECKOUTS", str(root))
    for name in ("secret", "open", "absent"):
        with pytest.raises(NotFoundError, match=r"no folder below|no file of the checkout"):
            await solve(scripted(RIGHT), {**data, "checkout": name})


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"files": {"../calc.py": ""}}, "is refused; use a relative path"),
        ({"tests": {"/etc/test_x.py": ""}}, "is refused; use a relative path"),
        ({"tests": {}}, "files and tests belong together"),
        ({"tests": {"calc.py": ""}}, "a file cannot be a test too"),
        ({"checkout": "x"}, "belong together"),
        ({"max_tries": 9}, "less than or equal to 8"),
        ({"statement": ""}, "at least 1 character"),
        ({"files": {"calc.py": "x" * 8_001}}, "at most 8000 characters"),
    ],
)
def test_a_wrong_input_is_refused_with_its_reason(change: dict[str, object], says: str) -> None:
    with pytest.raises(InputError, match=says):
        swe.SPEC.checked({**EXERCISE, **change})


def test_swe_bench_lines_feed_the_planner(tmp_path) -> None:
    file = tmp_path / "swe.jsonl"
    record = {"instance_id": "a__b-1", "repo": "a/b", "base_commit": "0", "problem_statement": "It is wrong."}
    file.write_text(json.dumps(record) + "\n")
    assert list(swe.read(file)) == [{"statement": "It is wrong."}]


def test_a_folder_of_exercises_is_read(tmp_path) -> None:
    folder = tmp_path / "one"
    folder.mkdir()
    (folder / "statement.txt").write_text("Wrong.\n")
    (folder / "a.py").write_text("A = 1\n")
    (folder / "test_a.py").write_text("from a import A\n")
    assert list(swe.read(tmp_path)) == [
        {"statement": "Wrong.", "files": {"a.py": "A = 1\n"}, "tests": {"test_a.py": "from a import A\n"}}
    ]

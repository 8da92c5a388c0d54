"""swe: plans, writes and tests a change until pytest passes or the tries are used up."""

import asyncio
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Annotated, Final, Literal

from langgraph.graph import END, START, StateGraph
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from agents.swe import SweState, analyser, coder, committer, planner, tester
from pbkv_ray.errors import InputError, NotFoundError
from pbkv_ray.graph.client import LLM
from workflows.records import SAMPLES, field, records
from workflows.spec import Graph, Json, WorkflowSpec
from workflows.tools.run_tests import run_tests
from workflows.tools.sandbox import Sandbox, safe_path

CHECKOUTS: Final = "PBKV_CHECKOUTS"
MAX_FILE_BYTES: Final = 8_000  # what fits into a prompt with the rest


def _below(name: str) -> str:
    try:
        return str(safe_path(name))
    except InputError as error:
        raise ValueError(str(error)) from error


FileName = Annotated[str, AfterValidator(_below)]
FileText = Annotated[str, Field(max_length=MAX_FILE_BYTES)]


class SweInput(BaseModel):
    """An exercise (`files`, `tests`), a checkout (`checkout`, `targets`, `test_paths`), or a statement alone."""

    model_config = ConfigDict(extra="forbid")

    statement: Annotated[str, Field(min_length=1, max_length=100_000)]
    files: Annotated[dict[FileName, FileText], Field(max_length=8)] = {}
    tests: Annotated[dict[FileName, FileText], Field(max_length=8)] = {}
    checkout: Annotated[str, AfterValidator(lambda name: name and _below(name))] = ""
    targets: Annotated[list[FileName], Field(max_length=8)] = []
    test_paths: Annotated[list[FileName], Field(max_length=20)] = []
    max_tries: Annotated[int, Field(ge=1, le=8)] = 2

    @model_validator(mode="after")
    def _complete(self) -> "SweInput":
        if bool(self.files) != bool(self.tests):
            raise ValueError("files and tests belong together: give both or neither")
        if not (bool(self.checkout) == bool(self.targets) == bool(self.test_paths)):
            raise ValueError("checkout, targets and test_paths belong together: give all or none")
        if self.files and self.checkout:
            raise ValueError("give files or a checkout, not both")
        if self.files.keys() & self.tests.keys():
            raise ValueError("a file cannot be a test too")
        return self


def build(llm: LLM) -> Graph:
    """Raises ConfigError when this machine cannot confine the tests and no one allowed to run them unconfined."""
    sandbox = Sandbox()
    graph = StateGraph(SweState)
    graph.add_node("open", open_files)
    graph.add_node("planner", partial(planner.run, llm))
    graph.add_node("coder", partial(coder.run, llm))
    graph.add_node("pytest", partial(pytest, sandbox))
    graph.add_node("tester", partial(tester.run, llm))
    graph.add_node("analyser", partial(analyser.run, llm))
    graph.add_node("committer", partial(committer.run, llm))
    graph.add_edge(START, "open")
    graph.add_edge("open", "planner")
    graph.add_conditional_edges("planner", after_planner)
    graph.add_edge("coder", "pytest")
    graph.add_edge("pytest", "tester")
    graph.add_conditional_edges("tester", after_tester)
    graph.add_edge("analyser", "coder")
    graph.add_edge("committer", END)
    return graph


async def open_files(state: SweState) -> SweState:
    """A tool: the texts of the files that may be changed."""
    if not state["checkout"]:
        return {"files": state["files"]}
    return {"files": await asyncio.to_thread(_targets, _folder(state["checkout"]), state["targets"])}


async def pytest(sandbox: Sandbox, state: SweState) -> SweState:
    """A tool: what pytest says about the coder's files."""
    files = {**state["files"], **state["patch"], **state["tests"]}
    base = _folder(state["checkout"]) if state["checkout"] else None
    result = await run_tests(sandbox, files, [*state["tests"], *state["test_paths"]], base)
    return {"exit_code": result.exit_code, "output": result.output}


def after_planner(state: SweState) -> Literal["coder", "__end__"]:
    """A statement alone (SWE-bench's lines carry no repository) ends with the plan."""
    return "coder" if state["target"] else "__end__"


def after_tester(state: SweState) -> Literal["committer", "analyser", "__end__"]:
    if state["exit_code"] == 0:
        return "committer"
    return "analyser" if state["tries"] < state["max_tries"] else "__end__"


def _folder(checkout: str) -> Path:
    """Only what the server's owner put below PBKV_CHECKOUTS: a caller must not read the whole machine."""
    root = os.environ.get(CHECKOUTS)
    if not root:
        raise InputError(f"checkout {checkout!r} needs {CHECKOUTS}, the folder of the checkouts; it is not set")
    folder = (Path(root) / checkout).resolve()
    if not folder.is_dir() or not folder.is_relative_to(Path(root).resolve()):
        raise NotFoundError(f"checkout {checkout!r} is no folder below {CHECKOUTS}")
    return folder


def _targets(folder: Path, targets: list[str]) -> dict[str, str]:
    texts = {}
    for name in targets:
        path = (folder / name).resolve()
        if not path.is_file() or not path.is_relative_to(folder):
            raise NotFoundError(f"target {name!r} is no file of the checkout")
        if path.stat().st_size > MAX_FILE_BYTES:
            raise InputError(f"target {name!r} has {path.stat().st_size} bytes; the agents take {MAX_FILE_BYTES}")
        texts[name] = path.read_text(encoding="utf-8", errors="replace")
    return texts


def read(path: Path) -> Iterator[Json]:
    """SWE-bench's JSON lines ({instance_id, problem_statement, ...}), or a folder of exercises.

    An exercise is a folder with statement.txt, the broken modules, and their tests in test_*.py.
    """
    if path.is_dir():
        yield from (_exercise(file.parent) for file in sorted(path.glob("*/statement.txt")))
    else:
        yield from ({"statement": field(record, "problem_statement", path)} for record in records(path))


def _exercise(folder: Path) -> Json:
    texts = {file.name: file.read_text(encoding="utf-8") for file in sorted(folder.glob("*.py"))}
    tests = {name: text for name, text in texts.items() if name.startswith("test_")}
    return {
        "statement": (folder / "statement.txt").read_text(encoding="utf-8").strip(),
        "files": {name: text for name, text in texts.items() if name not in tests},
        "tests": tests,
    }


def samples() -> list[Json]:
    return list(read(SAMPLES / "swe"))


SPEC = WorkflowSpec(
    name="swe",
    description="Repairs a program until its tests pass (SWE-bench).",
    build=build,
    agents=("planner", "coder", "tester", "analyser", "committer"),
    input_model=SweInput,
    samples=samples,
    read=read,
    recursion_limit=50,
)

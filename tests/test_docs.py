"""README and docs: every command, option, path, route, argument and snippet exists, and runs where that is cheap."""

import ast
import inspect
import json
import re
import shlex
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from deployments.http.page import PAGES as PAGES_SERVED
from tests.shells.gateway_kit import Kit

ROOT = Path(__file__).parents[1]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
SERVER = "http://127.0.0.1:8000"
WRITTEN_BY_THE_READER = {"mine.py", "full.txt", "dist/"}


def blocks(page: Path) -> Iterator[tuple[str, str]]:
    """(language, text) of the fenced blocks."""
    for match in re.finditer(r"^```(\w*)\n(.*?)^```$", page.read_text(), re.M | re.S):
        yield match[1], match[2]


def spans() -> Iterator[tuple[str, str]]:
    """(page, text) of what is marked as code in running text."""
    for page in PAGES:
        text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S)
        for code in re.findall(r"`([^`\n]+)`", text):
            yield page.name, code


def commands() -> Iterator[tuple[str, list[str]]]:
    """(page, words) of every command of ours, Ray's or make's."""
    for page in PAGES:
        for language, text in blocks(page):
            if language == "":
                for line in text.replace("\\\n", " ").splitlines():
                    yield page.name, words(line)
    for name, code in spans():
        if " " in code and "`" not in code:
            yield name, words(code)


def words(line: str) -> list[str]:
    try:
        found = shlex.split(line, comments=True)
    except ValueError:  # a picture, not a command
        return []
    return [found[0].removeprefix(".venv/bin/"), *found[1:]] if found else []


def named(program: str) -> list[Any]:
    found = [(page, line) for page, line in commands() if line[:1] == [program]]
    assert found, f"no page shows a command of {program}"
    return [pytest.param(line[1:], id=f"{page}: {shlex.join(line)}") for page, line in found]


def check(command: Any, arguments: list[str]) -> None:
    """Sub-commands exist, and so do all options. `command`: click's, or that of typer's own copy of click."""
    while arguments and arguments[0] in getattr(command, "commands", ()):
        command, arguments = command.commands[arguments[0]], arguments[1:]
    if hasattr(command, "commands") and not command.invoke_without_command:
        assert not arguments or arguments[0].startswith("-"), f"{command.name} has no command {arguments[0]!r}"
    known = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
    given = {argument.partition("=")[0] for argument in arguments if argument.startswith("-")}
    assert given - {"--help"} <= known


@pytest.mark.parametrize("arguments", named("pbkv"))
def test_commands_of_ours_exist(arguments: list[str]) -> None:
    from pbkv_ray.cli import build_app

    check(typer.main.get_command(build_app()), arguments)


@pytest.mark.parametrize("arguments", named("ray"))
def test_commands_of_ray_exist(arguments: list[str]) -> None:
    from ray.scripts.scripts import cli

    check(cli, arguments)
    if arguments[0] == "exec":
        program, *rest = shlex.split(arguments[2])
        check_served(rest) if program == "serve" else check(cli, rest)


@pytest.mark.parametrize("arguments", named("serve"))
def test_commands_of_serve_exist(arguments: list[str]) -> None:
    check_served(arguments)


def check_served(arguments: list[str]) -> None:
    from ray.serve.scripts import cli

    check(cli, arguments)


@pytest.mark.parametrize("arguments", named("make"))
def test_targets_of_make_exist(arguments: list[str]) -> None:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M)
    assert set(arguments) <= set(targets)


@pytest.mark.parametrize("arguments", named("python"))
def test_modules_that_are_run_exist(arguments: list[str]) -> None:
    assert arguments[0] == "-m"
    spec = find_spec(arguments[1])
    assert spec is not None and spec.origin is not None
    source = Path(spec.origin).read_text()
    assert {option for option in arguments[2:] if option.startswith("-") and f'"{option}"' not in source} == set()


def test_paths_exist() -> None:
    wrong = set()
    for page, code in spans():
        path = code.partition("::")[0]
        if not re.fullmatch(r"[\w./*-]+(\.(py|yaml|md|json|txt|toml)|/)", path) or path in WRITTEN_BY_THE_READER:
            continue
        if path.startswith(("/", "http")):
            continue
        folders = (ROOT, ROOT / "pbkv_ray")
        if not any(any(folder.glob(path.rstrip("/"))) for folder in folders):
            wrong.add((page, code))
    assert wrong == set()


def test_routes_exist() -> None:
    served = [*Kit().app().openapi()["paths"], *PAGES_SERVED, "/docs"]
    known = {re.sub(r"\{[^}]*\}", "{}", path) for path in served}
    shown = {
        re.sub(r"\{[^}]*\}", "{}", path)
        for _, code in spans()
        for path in re.findall(r"^(?:(?:GET|POST) )?(/[\w/{}-]*)$", code)
        if not path.startswith(("/etc/", "/opt/", "/models/"))
    }
    assert shown - known == set()


def test_the_table_of_arguments_is_that_of_the_application() -> None:
    from deployments.settings import AppArgs

    def told(default: Any) -> str:
        if default is None:
            return "none"
        return f"`{json.dumps(default) if isinstance(default, bool | dict) else default}`"

    rows = re.findall(r"^\| `(\w+)` \| (\S+) \| \S", (ROOT / "docs" / "operators.md").read_text(), re.M)
    fields = [(name, told(field.default)) for name, field in AppArgs.model_fields.items()]
    assert [row for row in rows if row[0] in AppArgs.model_fields] == fields


def test_a_server_reads_the_inner_layer_that_was_recorded() -> None:
    from deployments.settings import AppArgs
    from pbkv_ray.cli.record import inner_states

    (text,) = re.findall(r"`(engine_extra: [^`]*)`", (ROOT / "README.md").read_text())
    assert AppArgs.checked(yaml.safe_load(text)).engine_options().extra == inner_states([20])


def snippets() -> list[Any]:
    found = [(page.name, text) for page in PAGES for language, text in blocks(page) if language == "python"]
    return [pytest.param(text, id=f"{name}: {text.splitlines()[0]}") for name, text in found]


@pytest.mark.parametrize("text", snippets())
def test_snippets_compile(text: str) -> None:
    compile(text, "snippet", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


async def run(text: str, names: dict[str, Any]) -> None:
    code = compile(text, "snippet", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    done = eval(code, names)
    if inspect.iscoroutine(done):
        await done


def snippet(page: str, start: str) -> str:
    (found,) = (text for _, text in blocks(ROOT / page) if text.startswith(start))
    return found


async def test_the_langgraph_client_of_the_readme_gets_its_events() -> None:
    kit, seen = Kit(), list[Any]()
    async with kit.served() as url:
        text = snippet("README.md", "from langgraph_sdk").replace(SERVER, url)
        await run(text, {"print": lambda *parts: seen.append(parts[0])})
    assert (seen[0], seen[-1]) == ("metadata", "end")


async def test_the_harness_of_the_authors_page_names_its_run() -> None:
    import asyncio

    kit = Kit()
    async with kit.served() as url:
        text = snippet("docs/authors.md", "from openai").replace(SERVER, url)
        await asyncio.to_thread(exec, text, {})
    started = kit.events[0]
    assert (started.run_id, started.workflow, kit.events[1].agent) == ("ext:issue-17", "ext:fixes", "planner")


async def test_the_curl_of_the_readme_is_a_call_that_ends_its_run() -> None:
    (line,) = (line for page, line in commands() if line[:1] == ["curl"])
    headers = dict(line[at + 1].split(": ") for at, word in enumerate(line) if word == "-H")
    kit = Kit()
    async with kit.client() as client:
        body = line[line.index("-d") + 1]
        answer = await client.post(line[1].removeprefix(SERVER), content=body, headers=headers)
    assert answer.status_code == 200, answer.text
    assert type(kit.events[-1]).__name__ == "RunEnded"


async def test_the_workflow_of_the_authors_page_runs() -> None:
    class FakeLLM:
        async def chat(self, messages: list[Any], *, max_tokens: int) -> str:
            return f"<{messages[-1].content}>"

    names: dict[str, Any] = {"__name__": "mine"}
    text = snippet("docs/authors.md", "from langgraph.graph")
    exec(compile(text, "mine.py", "exec", dont_inherit=True), names)
    (spec,) = names["REGISTRY"].values()
    graph = spec.build(FakeLLM()).compile()
    assert sorted(spec.agents) == sorted(name for name in graph.get_graph().nodes if not name.startswith("__"))
    ended = await graph.ainvoke(spec.checked({"question": "Why?"}), {"recursion_limit": spec.recursion_limit})
    assert ended == {"question": "Why?", "answer": "<Why?\nImprove: <Why?>>"}
    lines = [line for line in text.splitlines() if line and not line.startswith(("from", "import"))]
    assert len(lines) <= 12


async def test_the_loop_of_the_authors_page_goes_on_until_the_critic_is_content() -> None:
    class FakeLLM:
        def __init__(self, *verdicts: str) -> None:
            self.verdicts = iter(verdicts)

        async def chat(self, messages: list[Any], *, max_tokens: int, regex: str | None = None) -> str:
            return "a note" if regex is None else next(self.verdicts)

    names: dict[str, Any] = {"__name__": "mine"}
    exec(compile(snippet("docs/authors.md", "from typing"), "mine.py", "exec", dont_inherit=True), names)
    (spec,) = names["REGISTRY"].values()
    rounds = []
    for verdicts in (["OK"], ["AGAIN", "OK"], ["AGAIN"] * 3):
        ended = await spec.build(FakeLLM(*verdicts)).compile().ainvoke(spec.checked({"task": "Rain."}))
        rounds.append((ended["rounds"], ended["verdict"]))
    assert rounds == [(1, "OK"), (2, "OK"), (3, "AGAIN")]

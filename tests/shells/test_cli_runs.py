"""`pbkv submit` and `pbkv runs` against a gateway over fakes: what they show, and what they say when it goes wrong."""

import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from deployments.service import RunRequest
from pbkv_ray.cli import build_app
from pbkv_ray.errors import InputError, PbkvError, UnavailableError
from tests.shells.fake_runs import FakeRunService
from tests.shells.gateway_kit import Kit

NOBODY = "http://127.0.0.1:9"
CALL = {
    "order": 1, "agent": "judge", "step": 1, "prompt_tokens": 1_200, "device_cached_tokens": 700,
    "host_cached_tokens": 0, "output_tokens": 5, "seconds": 1.5,
}  # fmt: skip


class OneCall(FakeRunService):
    """Every run makes one call, whose prompt was found in part."""

    async def get_run(self, thread_id: str | None, run_id: str) -> dict[str, Any]:
        run = await super().get_run(thread_id, run_id)
        return {**run, "error": {"error": "ValueError", "message": "no way"}} if run["status"] == "error" else run

    async def run_calls(self, run_id: str) -> Sequence[dict[str, Any]]:
        return [CALL]

    async def run_kv(self, run_id: str) -> dict[str, Any]:
        return {"calls": [{"order": 1, "missed": [{"start": 700, "end": 1_200, "cause": "evicted"}]}]}


def pbkv(*command: str, url: str = NOBODY) -> Any:
    return CliRunner(env={"PBKV_URL": url}).invoke(build_app(), command)


async def ended(service: FakeRunService, asked: dict[str, Any] | None = None) -> str:
    """A run of hover that has ended; its id."""
    run = await service.create_run(RunRequest(workflow="hover", input=asked or {}, thread_id=None))
    await service.runs[run["run_id"]].ended.wait()
    return str(run["run_id"])


async def test_runs_are_listed_by_name_and_shown_by_the_first_characters_of_their_id() -> None:
    kit = Kit(service=OneCall())
    run = await ended(kit.service)
    async with kit.served() as url:
        listed = await asyncio.to_thread(pbkv, "runs", "list", url=url)
        shown = await asyncio.to_thread(pbkv, "runs", "show", run[:8], url=url)
        as_json = await asyncio.to_thread(pbkv, "runs", "show", run, "--json", url=url)
        unknown = await asyncio.to_thread(pbkv, "runs", "show", "nope", url=url)
        over = await asyncio.to_thread(pbkv, "runs", "cancel", run[:8], url=url)
    assert [word in listed.output for word in (run, "hover", "success")] == [True] * 3
    assert f"{run}  hover  success" in shown.output
    assert "500 evicted" in shown.output
    assert 'output: {\n "step": 1\n}' in shown.output
    told = json.loads(as_json.output)
    assert (told["calls"], told["output"], told["workflow"]) == ([CALL], {"step": 1}, "hover")
    assert isinstance(unknown.exception, InputError) and "run 'nope' does not exist" in str(unknown.exception)
    assert over.output == f"{run} has ended already: success\n"


async def test_a_run_that_fails_says_why() -> None:
    kit = Kit(service=OneCall())
    async with kit.served() as url:
        failed = await asyncio.to_thread(pbkv, "submit", "hover", "--input", '{"fail": "no way"}', url=url)
    (run,) = kit.service.runs
    assert (failed.exit_code, f"{run}: ValueError: no way" in failed.stderr) == (1, True)
    assert "error" in failed.stdout


async def test_the_beginning_of_an_id_must_be_that_of_one_run() -> None:
    kit = Kit(service=OneCall())
    for _ in range(2):
        await ended(kit.service)
    async with kit.served() as url:
        shown = await asyncio.to_thread(pbkv, "runs", "show", "", url=url)
    assert str(shown.exception) == "2 runs begin with ''; give more of the id"


async def test_what_the_server_refuses_is_said_in_one_sentence_however_many_runs_it_concerns(tmp_path: Path) -> None:
    file = tmp_path / "inputs.jsonl"
    file.write_text('{"steps": "many"}\n' * 3)
    async with Kit().served() as url:
        unknown = await asyncio.to_thread(pbkv, "submit", "essay", "--input", "{}", url=url)
        wrong = await asyncio.to_thread(pbkv, "submit", "essay", "--file", str(file), url=url)
    for answer in (unknown, wrong):
        assert isinstance(answer.exception, InputError)
        assert "answered 404: assistant 'essay' is unknown; the workflows here are: hover, swe" in str(answer.exception)


@pytest.mark.parametrize(
    ("command", "kind", "said"),
    [
        (("submit", "hover", "--limit", "2"), UnavailableError, f"nothing answers at {NOBODY} "),
        (("submit", "hover", "--url", "127.0.0.1:9"), InputError, "--url is '127.0.0.1:9', which is no address"),
        (("runs", "list", "--url", "http://x:y"), InputError, "--url is 'http://x:y', which is no address"),
        (("submit", "essay"), InputError, "workflow 'essay' is not one of finance, hover, swe, whose samples"),
        (("submit", "essay", "--file", "no.jsonl"), InputError, "--file no.jsonl does not exist"),
        (("submit", "hover", "--registry", "mine"), PbkvError, "registry is 'mine'; give module:attribute"),
    ],
)
def test_what_is_wrong_with_a_command_is_said(command: tuple[str, ...], kind: type[PbkvError], said: str) -> None:
    answer = pbkv(*command)
    assert isinstance(answer.exception, kind), answer.exception
    assert said in str(answer.exception)


def test_a_registry_of_ones_own_in_this_folder_is_found_and_has_its_own_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "of_mine.py").write_text(
        "from dataclasses import replace\n"
        "from workflows.finance import SPEC\n"
        "def spec(name, *inputs): return replace(SPEC, name=name, samples=lambda: list(inputs))\n"
        "REGISTRY = {'some': spec('some', {}), 'none': spec('none')}\n"
    )
    none, some = (pbkv("submit", name, "--registry", "of_mine:REGISTRY") for name in ("none", "some"))
    assert "the registry holds no input for none; give --input or --file" in str(none.exception)
    assert "nothing answers" in str(some.exception)

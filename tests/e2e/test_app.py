"""The whole application: gateway, runner, controller and a real engine (the tiny random-weight model) on Ray Serve."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from langgraph_sdk import get_client
from typer.testing import CliRunner

from pbkv_ray.errors import InputError
from pbkv_ray.predict import dataset
from pbkv_ray.replay.recorded import export
from tests.e2e import openai_script, sdk_script
from tests.e2e.load import served

pytestmark = [pytest.mark.ray, pytest.mark.engine]

QUICK = {"task": "hello", "rounds": 2}
SLOW = {"task": "hello", "rounds": 50, "answer_tokens": 200}


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"sqlite+aiosqlite:///{tmp_path_factory.mktemp('app')}/runs.sqlite"


@pytest.fixture(scope="module")
def url(ray_cluster: None, tiny_model: Path, database: str) -> Iterator[str]:
    with served("pbkv-tests", tiny_model, database, policy="pbkv", record=True) as url:
        yield url


def metric(text: str, name: str) -> float:
    """The sum of a metric's samples."""
    lines = [line for line in text.splitlines() if line.split("{")[0].split(" ")[0] == name]
    assert lines, f"{name} is not exposed"
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


async def test_the_stock_langgraph_client_works_unchanged(url: str):
    seen = await sdk_script.exercise(url, "echo", QUICK, SLOW)
    assert seen["assistants"]["graph_nodes"] == ["__start__", "speaker", "counter", "__end__"]
    assert (seen["background"]["status"], seen["background"]["values"]["done"]) == ("success", 2)
    assert (seen["busy"]["cancelled"], seen["busy"]["queued"]) == ("interrupted", "success")
    assert seen["stateless"]["batch"] == ["success", "success"]


async def test_the_stock_openai_client_works_unchanged(url: str):
    seen = await asyncio.to_thread(openai_script.exercise, url)
    assert seen["refused"] == ["UnprocessableEntityError", "NotFoundError"] or seen["refused"][1] == "NotFoundError"


async def test_calls_and_the_cache_are_accounted_to_the_run(url: str):
    async with get_client(url=url, api_key="") as client:
        run = await client.runs.create(None, "echo", input={"task": "a long enough task " * 20, "rounds": 3})
        await client.runs.join(run["thread_id"], run["run_id"])
    async with httpx.AsyncClient(base_url=url) as http:
        calls = (await http.get(f"/v1/runs/{run['run_id']}/calls")).json()
    assert [(call["agent"], call["step"]) for call in calls] == [("speaker", 1), ("speaker", 3), ("speaker", 5)]
    # The task is the same in every round: from the second call on it comes from the device tier.
    assert calls[0]["prompt_tokens"] > 100
    assert all(call["device_cached_tokens"] > 100 for call in calls[1:])
    assert {call["reason"] for call in calls} <= {"stop", "length"}


async def test_cancelling_a_run_stops_its_call_in_the_engine(url: str):
    from ray import serve

    engine = serve.get_deployment_handle("Engine", "pbkv-tests")
    async with get_client(url=url, api_key="") as client:
        run = await client.runs.create(None, "echo", input=SLOW)
        async with asyncio.timeout(60):
            while (await engine.load.remote())["running"] == 0:
                await asyncio.sleep(0.05)
            await client.runs.cancel(run["thread_id"], run["run_id"], wait=True)
            while any((await engine.load.remote()).values()):
                await asyncio.sleep(0.05)
        assert (await client.runs.get(run["thread_id"], run["run_id"]))["status"] == "interrupted"


async def test_the_controller_heard_of_every_run_and_steered_the_engine(url: str):
    async with get_client(url=url, api_key="") as client:
        run = await client.runs.create(None, "echo", input=QUICK)
        await client.runs.join(run["thread_id"], run["run_id"])
    async with httpx.AsyncClient(base_url=url) as http, asyncio.timeout(60):
        while metric(text := (await http.get("/metrics")).text, "pbkv_controller_runs_active") > 0:
            await asyncio.sleep(0.1)
    assert metric(text, "pbkv_controller_runs_completed_total") >= 1
    assert metric(text, "pbkv_controller_calls_finished_total") >= 2
    assert metric(text, "pbkv_controller_action_retirerun_total") >= 1
    assert metric(text, "pbkv_controller_replicas") == 1
    assert metric(text, "sglang:prompt_tokens_total") > 0
    assert metric(text, "pbkv_engine_tokens_total") > 0


async def test_runs_are_recorded_with_their_hidden_states_and_leave_as_a_trace(url: str, database: str, tmp_path: Path):
    async with get_client(url=url, api_key="") as client:
        run = await client.runs.create(None, "echo", input=QUICK)
        await client.runs.join(run["thread_id"], run["run_id"])
        async with asyncio.timeout(60):
            while run["run_id"] not in await asyncio.to_thread(recorded, database, tmp_path):
                await asyncio.sleep(0.2)
    kept = dataset.load(tmp_path / "own.wf.jsonl.gz").runs
    (mine,) = (one for one in kept if one.run_id == run["run_id"])
    assert (mine.workflow, mine.agents) == ("echo", ("speaker", "speaker"))
    # On a busy machine states of one run may come after its record; not those of all.
    widths = {name: states.shape[1] for one in kept for name, states in one.hidden.items()}
    assert widths == {"prefill": 128, "decode": 128}
    assert mine.instance != mine.run_id, "named by its input"


def recorded(database: str, folder: Path) -> list[str]:
    """Run ids of an export; none while nothing has been recorded."""
    try:
        export(database, folder / "own.wf.jsonl.gz", workflow="echo")
    except InputError:
        return []
    return [run.run_id for run in dataset.load(folder / "own.wf.jsonl.gz").runs]


async def test_the_live_page_shows_a_run_in_flight_and_how_full_the_engine_is(url: str):
    async with get_client(url=url, api_key="") as client, httpx.AsyncClient(base_url=url) as http:
        assert (await http.get("/")).headers["content-type"] == "text/html; charset=utf-8"
        run = await client.runs.create(None, "echo", input=SLOW)
        try:
            async with asyncio.timeout(60):
                row, device = None, None
                while not (row and row["forecast"] and device):
                    await asyncio.sleep(0.2)
                    seen = (await http.get("/v1/live/snapshot")).json()
                    row = next((row for row in seen["runs"]["rows"] if row["run_id"] == run["run_id"]), None)
                    device = next((replica["device"] for replica in seen["replicas"]), None)
        finally:
            await client.runs.cancel(run["thread_id"], run["run_id"], wait=True)
    assert (row["workflow"], row["path"][0]) == ("echo", "speaker")
    assert {agent for agent, _ in row["forecast"][0]} <= {"speaker", "END"}
    assert 0 < device["pool"] <= 8_192
    assert device["free"] + device["retired"] + device["used"] == device["pool"]


def test_submit_prints_one_json_row_a_run(url: str, monkeypatch: pytest.MonkeyPatch):
    from pbkv_ray.cli import build_app

    result = CliRunner().invoke(build_app(), ["submit", "echo", "--input", json.dumps(QUICK), "--json", "--url", url])
    assert result.exit_code == 0, result.output
    (row,) = json.loads(result.stdout)["runs"]
    assert (row["workflow"], row["status"], row["agents"], row["calls"]) == ("echo", "success", ["speaker"] * 2, 2)
    assert sorted(row) == [
        "agents", "calls", "device_cached_tokens", "host_cached_tokens", "output_tokens", "prompt_tokens",
        "run_id", "seconds", "status", "workflow",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["submit", "echo", "--input", "{"], "--input is no JSON"),
        (["submit", "echo", "--input", "[1]"], "--input is a JSON list; it must be an object"),
        (["submit", "hover", "--file", "missing.json"], "--file missing.json does not exist"),
        (["submit", "no-such", "--limit", "1"], "workflow 'no-such' is not one of finance, hover, swe, whose"),
    ],
)
def test_bad_input_ends_with_a_sentence(arguments: list[str], said: str):
    from pbkv_ray.cli import build_app
    from pbkv_ray.errors import PbkvError

    result = CliRunner().invoke(build_app(), arguments)
    assert isinstance(result.exception, PbkvError)
    assert said in str(result.exception)
    assert result.exception.exit_code == 2

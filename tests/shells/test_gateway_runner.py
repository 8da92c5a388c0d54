"""The gateway over the real runner on a SQLite store; only the engine behind the workflows' LLM client is a fake."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deployments.gateway import GatewayOptions, create_app
from tests.e2e import sdk_script
from tests.shells import runner_kit
from tests.shells.fake_runs import FakeChat
from tests.shells.gateway_kit import eventually, served
from tests.shells.test_gateway_fuzz import POSTS, bodies, checked, encoded

WORKFLOWS = {name: f"{name}, for tests" for name in runner_kit.specs()}


@pytest.fixture
async def kit(tmp_path: Path) -> AsyncIterator[runner_kit.Kit]:
    async with runner_kit.Kit(f"sqlite+aiosqlite:///{tmp_path / 'runs.sqlite'}") as made:
        yield made


async def over(kit: runner_kit.Kit, options: GatewayOptions | None = None) -> FastAPI:
    return create_app(await kit.runner(), FakeChat(), options, workflows=WORKFLOWS)


@pytest.mark.parametrize("key", ["", "0123456789abcdef-key"], ids=["open", "keys"])
async def test_the_sdk_script_runs_on_the_real_runner(kit: runner_kit.Kit, key: str) -> None:
    options = GatewayOptions(api_keys=(key,), salt_secret="a secret of the server") if key else GatewayOptions()
    async with served(await over(kit, options)) as url:
        seen = await sdk_script.exercise(url, "chain", {"task": "hello"}, {"task": "please wait"}, key)
    assert seen["assistants"]["count"] == len(WORKFLOWS)
    assert seen["assistants"]["graph_nodes"] == ["__start__", "plan", "write", "__end__"]
    assert seen["background"]["status"] == "success"
    assert seen["background"]["values"]["said"] == ["plan:plan", "write:hello"]
    assert seen["stream"]["events"] == ["end", "metadata", "updates", "values"]
    assert (seen["busy"]["cancelled"], seen["busy"]["queued"]) == ("interrupted", "success")
    assert seen["stateless"]["batch"] == ["success", "success"]
    assert kit.transport.aborted == ["write"]  # the cancelled run's call, and only it
    salts = {call.cache_salt for call in kit.transport.calls}
    assert len(salts) == 1 and (salts == {None}) == (not key)


async def test_leaving_a_stateless_stream_aborts_the_llm_call(kit: runner_kit.Kit) -> None:
    async with served(await over(kit)) as url, httpx.AsyncClient(base_url=url) as client:
        asked = {"assistant_id": "chain", "input": {"task": "please wait"}}
        async with client.stream("POST", "/runs/stream", json=asked) as response:
            path = response.headers["content-location"]
            assert "event: metadata" in await anext(response.aiter_text())
            await eventually(kit.transport.waiting)
        assert (await client.get(f"{path}/join")).status_code == 200
        status = (await client.get(path)).json()["status"]
    assert (status, kit.transport.aborted) == ("interrupted", ["write"])


async def test_leaving_a_threads_stream_leaves_the_llm_call(kit: runner_kit.Kit) -> None:
    async with served(await over(kit)) as url, httpx.AsyncClient(base_url=url) as client:
        thread_id = (await client.post("/threads", json={})).json()["thread_id"]
        asked = {"assistant_id": "chain", "input": {"task": "please wait"}, "stream_mode": "updates"}
        async with client.stream("POST", f"/threads/{thread_id}/runs/stream", json=asked) as response:
            path = response.headers["content-location"]
            await eventually(kit.transport.waiting)
        kit.transport.let_go.set()
        values = (await client.get(f"{path}/join")).json()
        calls = (await client.get(f"/v1/runs/{path.rpartition('/')[2]}/calls")).json()
    assert values["said"] == ["plan:plan", "write:please wait"]
    assert kit.transport.aborted == []
    assert [call["agent"] for call in calls] == ["plan", "write"]


async def test_a_person_answers_an_interrupt(kit: runner_kit.Kit) -> None:
    async with served(await over(kit)) as url, httpx.AsyncClient(base_url=url) as client:
        thread_id = (await client.post("/threads", json={})).json()["thread_id"]
        path = f"/threads/{thread_id}/runs/wait"
        asked = (await client.post(path, json={"assistant_id": "asking", "input": {"task": "sure?"}})).json()
        found = (await client.post("/threads/search", json={"status": "interrupted"})).json()
        answered = (await client.post(path, json={"assistant_id": "asking", "command": {"resume": "yes"}})).json()
    assert asked["__interrupt__"][0]["value"] == {"question": "sure?"}
    assert [thread["thread_id"] for thread in found] == [thread_id]
    assert answered["said"][-1] == "approved:yes"


async def test_a_run_stops_before_every_graph_node_when_asked(kit: runner_kit.Kit) -> None:
    async with served(await over(kit)) as url, httpx.AsyncClient(base_url=url) as client:
        thread_id = (await client.post("/threads", json={})).json()["thread_id"]
        asked = {"assistant_id": "chain", "input": {"task": "hello"}, "interrupt_before": "*"}
        await client.post(f"/threads/{thread_id}/runs/wait", json=asked)
        state = (await client.get(f"/threads/{thread_id}/state")).json()
    assert (state["next"], kit.transport.calls) == (["plan"], [])


FUZZ = settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)


async def test_bodies_of_any_shape_are_answered_by_the_real_runner_too(kit: runner_kit.Kit) -> None:
    app = await over(kit, GatewayOptions(max_body_bytes=20_000))
    transport = httpx.ASGITransport(app)
    loop = asyncio.get_running_loop()
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:

        async def one(path: str, body: Any) -> None:
            await client.post("/threads", json={"thread_id": "t1", "if_exists": "do_nothing"})
            answer = await client.post(path, content=encoded(body), headers={"content-type": "application/json"})
            checked(path, answer)

        @FUZZ
        @given(st.sampled_from(sorted(POSTS)).flatmap(lambda path: st.tuples(st.just(path), bodies(path, "chain"))))
        def many(sent: tuple[str, Any]) -> None:
            asyncio.run_coroutine_threadsafe(one(*sent), loop).result(60)

        await asyncio.to_thread(many)

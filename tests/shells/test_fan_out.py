"""Three real engines behind the router: siblings with one cold prefix compute it once, and runs stay at home."""

import asyncio
import uuid
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
import pytest_asyncio

from deployments.engine import EngineDeploymentOptions, engine_app
from deployments.transport import HandleTransport
from pbkv_ray.config import ControllerOptions, EngineOptions
from pbkv_ray.control.actor import start_controller, stop_controller
from pbkv_ray.control.client import ControllerClient
from pbkv_ray.core.calls import Call, Caller, Message, Reply
from pbkv_ray.core.events import Batch, RunEnded, RunStarted
from pbkv_ray.routing.metrics import router_text
from tests.shells.engine_kit import answer, becomes

pytestmark = [pytest.mark.soak, pytest.mark.engine, pytest.mark.ray]
APP = "fan-out-tests"
REPLICAS = 3


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def transport(ray_cluster: None, engine_options: EngineOptions) -> AsyncIterator[HandleTransport]:
    from ray import serve

    from pbkv_ray.routing.router import router_config

    options = replace(
        engine_options,
        policy="pbkv+",
        device_pool_tokens=65_536,
        host_pool_ratio=0.0,
        context_length=8_192,
        chunked_prefill_tokens=32_768,  # a batch has room for all siblings: the hardest case
    )
    deployment = EngineDeploymentOptions(
        replicas=REPLICAS, gpus=0, cpus=0.5, health_check_timeout_s=120.0, router=router_config(consult_timeout_s=5.0)
    )

    def start() -> Any:
        serve.start(proxy_location="Disabled")
        start_controller(APP, ControllerOptions())
        return serve.run(engine_app(options, deployment), name=APP, route_prefix=None)

    handle = await asyncio.to_thread(start)
    controller = ControllerClient(APP, timeout_s=30.0)

    async def joined() -> float:
        return (await controller.counts())["replicas"]

    await becomes(REPLICAS, joined)
    yield HandleTransport(handle)
    await asyncio.to_thread(serve.delete, APP)
    stop_controller(APP)


def prefix(name: str) -> str:
    return " ".join(f"{name}{number}" for number in range(1_080))


def call(run: str, text: str, parent: str | None = None) -> Call:
    return Call(uuid.uuid4().hex, Caller(run, "hover", "judge", 1, parent), (Message("user", text),), max_tokens=4)


def fallbacks() -> list[str]:
    return [line for line in router_text().splitlines() if line.startswith("pbkv_router_fallbacks_total{")]


async def fan_out(transport: HandleTransport, runs: list[str], shared: str, parent: str | None = None) -> list[Reply]:
    asked = (call(run, f"{shared} Question {number}?", parent) for number, run in enumerate(runs))
    return list(await asyncio.gather(*(answer(transport, one) for one in asked)))


async def end(runs: list[str]) -> None:
    """A run that lives counts at its home with what its next call will bring."""
    events = tuple(RunEnded(run, "completed", 2.0) for run in runs)
    await ControllerClient(APP, timeout_s=30.0).send(Batch(f"end of {runs[0]}", 0, events))


def times_computed(replies: list[Reply], cold_tokens: int) -> float:
    return sum(reply.prompt_tokens - reply.device_cached_tokens for reply in replies) / cold_tokens


async def test_eight_calls_of_a_run_compute_their_cold_prefix_once(transport: HandleTransport) -> None:
    replies = await fan_out(transport, ["run-1"] * 8, prefix("alpha"))
    assert len({reply.replica for reply in replies}) == 1
    assert replies[0].prompt_tokens > 4_000
    assert times_computed(replies, replies[0].prompt_tokens) < 1.2
    again = await fan_out(transport, ["run-1"] * 3, prefix("alpha"))
    assert {reply.replica for reply in again} == {replies[0].replica}
    assert times_computed(again, replies[0].prompt_tokens) < 0.2
    await end(["run-1"])


async def test_eight_sub_agents_with_runs_of_their_own_do_so_too(transport: HandleTransport) -> None:
    runs = [f"child-{number}" for number in range(8)]
    started = tuple(RunStarted(run, "hover", 1.0, parent_run_id="lead") for run in runs)
    await ControllerClient(APP, timeout_s=30.0).send(Batch("test", 0, started))
    replies = await fan_out(transport, runs, prefix("beta"), parent="lead")
    assert len({reply.replica for reply in replies}) == 1
    assert times_computed(replies, replies[0].prompt_tokens) <= 2.0
    await end(runs)


async def test_runs_spread_and_stay(transport: HandleTransport) -> None:
    runs, before = [f"run-{number}" for number in range(10, 19)], fallbacks()
    texts = {run: prefix(run)[:4_000] for run in runs}
    first = [await answer(transport, call(run, texts[run])) for run in runs]
    assert {reply.replica for reply in first} == {reply.replica for reply in first[:REPLICAS]}
    assert len({reply.replica for reply in first}) == REPLICAS
    for turn in range(3):
        later = [await answer(transport, call(run, f"{texts[run]} Turn {turn}.")) for run in runs]
        assert [reply.replica for reply in later] == [reply.replica for reply in first]
        assert all(reply.device_cached_tokens > 0.8 * reply.prompt_tokens for reply in later)
    assert fallbacks() == before

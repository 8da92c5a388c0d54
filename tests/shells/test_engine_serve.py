"""Engines behind Ray Serve: calls through a handle, callers that leave, replicas that die."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
import pytest_asyncio

from deployments.engine import EngineDeploymentOptions, engine_app, serve_options
from deployments.transport import HandleTransport
from pbkv_ray.config import EngineOptions
from pbkv_ray.errors import ConfigError, EngineError, InputError
from tests.shells.engine_kit import alive, answer, becomes, call

real = [pytest.mark.engine, pytest.mark.ray]
APP = "engine-tests"


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def handle(ray_cluster: None, engine_options: EngineOptions) -> AsyncIterator[Any]:
    """One real engine in one replica. The last tests kill it; Serve brings another."""
    from ray import serve

    def start() -> Any:
        serve.start(proxy_location="Disabled")
        options = replace(engine_options, write_policy="write_through_selective")
        app = engine_app(options, EngineDeploymentOptions(gpus=0, graceful_shutdown_timeout_s=5.0))
        return serve.run(app, name=APP, route_prefix=None)

    yield await asyncio.to_thread(start)
    await asyncio.to_thread(serve.delete, APP)


async def held(handle: Any) -> tuple[int, int]:
    load = await handle.load.remote()
    return load["running"], load["waiting"]


class TestCallsThroughAHandle:
    pytestmark = real

    async def test_a_call_streams_and_its_reply_names_the_replica(self, handle: Any) -> None:
        reply = await answer(HandleTransport(handle), call("Name three colours.", max_tokens=6))
        assert (reply.reason, reply.output_tokens) == ("length", 6)
        assert len(reply.replica) == 8

    async def test_a_refused_call_comes_back_as_our_error(self, handle: Any) -> None:
        with pytest.raises(InputError, match=r"^the prompt has \d+ tokens; the engine takes fewer than \d+"):
            await answer(HandleTransport(handle), call("word " * 9_000))

    async def test_a_caller_that_leaves_stops_the_call_in_the_scheduler(self, handle: Any) -> None:
        stream = HandleTransport(handle).stream(call("Count.", max_tokens=3_000))
        await anext(stream)
        await becomes((1, 0), lambda: held(handle))
        await stream.aclose()  # type: ignore[attr-defined]
        await becomes((0, 0), lambda: held(handle))

    async def test_a_caller_that_is_cancelled_stops_the_call_in_the_scheduler(self, handle: Any) -> None:
        reader = asyncio.create_task(answer(HandleTransport(handle), call("Count on.", max_tokens=3_000)))
        await becomes((1, 0), lambda: held(handle))
        reader.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reader
        await becomes((0, 0), lambda: held(handle))

    async def test_the_openai_protocol_passes_whole_and_in_pieces(self, handle: Any) -> None:
        chat = HandleTransport(handle)
        body = {"messages": [{"role": "user", "content": "Hello."}], "max_tokens": 4, "temperature": 0, "rid": "f-1"}
        whole = await chat.openai_chat(body, None, None)
        assert isinstance(whole, dict)
        assert whole["usage"]["completion_tokens"] == 4
        stream = await chat.openai_chat({**body, "rid": "f-2", "stream": True}, None, None)
        assert not isinstance(stream, dict)
        assert b"".join([piece async for piece in stream]).endswith(b"data: [DONE]\n\n")
        assert [model["id"] for model in (await chat.models())["data"]] == [whole["model"]]

    async def test_openai_callers_that_leave_stop_their_calls(self, handle: Any) -> None:
        chat = HandleTransport(handle)
        body = {"messages": [{"role": "user", "content": "Count."}], "max_tokens": 3_000}
        stream = await chat.openai_chat({**body, "rid": "f-3", "stream": True}, None, None)
        assert not isinstance(stream, dict)
        await anext(stream)
        await stream.aclose()  # type: ignore[attr-defined]
        await becomes((0, 0), lambda: held(handle))
        waiting = asyncio.create_task(chat.openai_chat({**body, "rid": "f-4"}, None, None))
        await becomes((1, 0), lambda: held(handle))
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await becomes((0, 0), lambda: held(handle))

    async def test_the_metrics_of_every_replica_are_collected(self, handle: Any) -> None:
        (text,) = await HandleTransport(handle).metrics_text()
        assert "pbkv_engine_running_calls" in text
        assert "sglang:num_running_reqs" in text

    async def test_a_killed_replica_leaves_no_process_and_another_takes_over(self, handle: Any) -> None:
        transport = HandleTransport(handle, attempts=8)
        replica, *engine = await handle.pids.remote()
        stream = transport.stream(call("Count.", max_tokens=3_000))
        await anext(stream)
        os.kill(replica, signal.SIGKILL)
        with pytest.raises(EngineError, match="replica died during the call"):
            async for _ in stream:
                pass
        await becomes([], lambda: alive([replica, *engine]))
        reply = await answer(transport, call("Still there?", max_tokens=4))
        assert reply.output_tokens == 4
        assert (await handle.pids.remote())[0] != replica

    async def test_a_replica_that_lost_its_scheduler_tells_its_calls_and_is_replaced(self, handle: Any) -> None:
        transport = HandleTransport(handle, attempts=8)
        replica, *engine = await handle.pids.remote()
        stream = transport.stream(call("Count.", max_tokens=3_000))
        await anext(stream)
        os.kill(engine[0], signal.SIGKILL)
        with pytest.raises(EngineError):
            async for _ in stream:
                pass
        await becomes([], lambda: alive([replica, *engine]))
        assert (await answer(transport, call("Still there?", max_tokens=4))).output_tokens == 4

    async def test_an_orderly_end_leaves_no_process_either(self, handle: Any) -> None:
        from ray import serve

        pids = await handle.pids.remote()
        await asyncio.to_thread(serve.delete, APP)
        await becomes([], lambda: alive(pids))


OPTIONS = EngineOptions(model="default", tensor_parallel=2)


def test_tensor_parallel_engines_ask_for_one_bundle_with_all_their_gpus() -> None:
    chosen = serve_options(OPTIONS, EngineDeploymentOptions(gpus=2, replicas=3, cpus=4))
    assert chosen["placement_group_bundles"] == [{"CPU": 4, "GPU": 2}]
    assert chosen["placement_group_strategy"] == "STRICT_PACK"
    assert chosen["ray_actor_options"]["num_gpus"] == 2
    assert chosen["num_replicas"] == 3


def test_autoscaling_replaces_a_number_of_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    scaling = {"min_replicas": 1, "max_replicas": 4}
    chosen = serve_options(OPTIONS, EngineDeploymentOptions(gpus=0, autoscaling=scaling, max_ongoing_requests=64))
    assert chosen["autoscaling_config"] == scaling
    assert "num_replicas" not in chosen
    assert "placement_group_bundles" not in chosen
    assert chosen["max_ongoing_requests"] == 64
    assert chosen["ray_actor_options"]["runtime_env"]["env_vars"]["XDG_CACHE_HOME"] == "/somewhere"


def test_the_policy_is_one_that_ray_serve_takes_and_asks():
    from types import SimpleNamespace

    from ray.serve.config import AutoscalingConfig

    from deployments.app import _autoscaling
    from deployments.settings import AppArgs

    args = AppArgs.checked({"engine_replicas": 1, "max_engine_replicas": 4, "scale_at_queued_tokens": 1_000})
    config = AutoscalingConfig(**_autoscaling(args))
    policy = config.policy.get_policy()(**config.policy.policy_kwargs)
    asked = SimpleNamespace(
        target_num_replicas=2,
        aggregated_metrics={"queued_prefill_tokens": {"a": 1_500.0, "b": 1_500.0}, "running_calls": {"a": 4.0}},
    )
    assert policy(asked) == (3, {})
    assert policy(SimpleNamespace(target_num_replicas=2, aggregated_metrics=None)) == (2, {})


def test_a_replica_without_a_gpu_for_every_rank_is_refused() -> None:
    with pytest.raises(ConfigError, match="gpus is 1, tensor_parallel 2"):
        serve_options(OPTIONS, EngineDeploymentOptions(gpus=1))

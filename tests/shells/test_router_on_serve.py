"""The request router on real Ray Serve, before fake engines."""

import asyncio
import os
import signal
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from pbkv_ray.core.calls import Call
from pbkv_ray.routing.metrics import router_text
from tests.shells.test_router import call


class FakeEngine:
    """Answers every call with its replica's id."""

    def __init__(self) -> None:
        from ray import serve

        self.replica = serve.get_replica_context().replica_id.unique_id

    async def stream(self, asked: Call) -> AsyncIterator[str]:
        yield self.replica

    async def pid(self) -> int:
        return os.getpid()


class FakeRunner:
    """Makes calls of runs inside one Serve request, as graphs with parallel branches do."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine

    async def fan_out(self, runs: list[str], calls: int) -> list[list[str]]:
        async def one(run: str, number: int) -> str:
            response = self.engine.options(stream=True, method_name="stream").remote(call(run, number=number))
            async with asyncio.timeout(30):
                (replica,) = [item async for item in response]
                return str(replica)

        async def of_run(run: str) -> list[str]:
            return list(await asyncio.gather(*(one(run, n) for n in range(calls))))

        return list(await asyncio.gather(*(of_run(run) for run in runs)))

    async def metrics(self) -> str:
        return router_text()

    async def pid(self) -> int:
        return await self.engine.options(method_name="pid").remote()


APP = "router-tests"


@pytest.fixture(scope="module")
def runner(ray_cluster: None) -> Iterator[Any]:
    from ray import serve

    from pbkv_ray.config import ControllerOptions
    from pbkv_ray.control.actor import start_controller, stop_controller
    from pbkv_ray.routing.router import router_config

    serve.start(proxy_location="Disabled")
    start_controller(APP, ControllerOptions())
    engines = serve.deployment(
        FakeEngine,
        name="Engine",
        num_replicas=3,
        max_ongoing_requests=100,
        ray_actor_options={"num_cpus": 0.1},
        request_router_config=router_config(consult_timeout_s=5.0),
    ).bind()
    made = serve.deployment(FakeRunner, name="Runner", ray_actor_options={"num_cpus": 0.1}).bind(engines)
    yield serve.run(made, name=APP, route_prefix=None)
    serve.delete(APP)
    stop_controller(APP)


@pytest.mark.soak  # starts Ray Serve: about a minute
@pytest.mark.ray
class TestOnRayServe:
    async def test_calls_of_a_run_stay_home_however_many_come_at_once(self, runner: Any) -> None:
        runs = [f"run-{n}" for n in range(12)]
        first = await runner.fan_out.remote(runs, 8)
        assert [len(set(homes)) for homes in first] == [1] * 12
        homes = [homes[0] for homes in first]
        assert sorted(Counter(homes).values()) == [4, 4, 4]
        again = await runner.fan_out.remote(runs, 2)
        assert again == [[home] * 2 for home in homes]
        text = await runner.metrics.remote()
        assert 'pbkv_router_consults_total{outcome="placed"} 12.0' in text
        assert "pbkv_router_fallbacks_total{" not in text

    async def test_calls_that_belong_to_no_run_go_to_one_of_two(self, runner: Any) -> None:
        assert await runner.pid.remote() > 0
        assert 'pbkv_router_fallbacks_total{cause="no_run"} 1.0' in await runner.metrics.remote()

    async def test_without_a_controller_calls_go_on_and_stay_home(self, runner: Any) -> None:
        import ray

        from pbkv_ray.control.actor import controller_name

        (known,) = await runner.fan_out.remote(["run-0"], 1)
        actor = ray.get_actor(controller_name(APP), namespace="pbkv")
        os.kill(await actor.__ray_call__.remote(lambda self: os.getpid()), signal.SIGKILL)
        runs = [f"late-{n}" for n in range(3)]
        first = await runner.fan_out.remote(["run-0", *runs], 4)
        assert first[0] == known * 4
        assert [len(set(homes)) for homes in first] == [1] * 4
        assert await runner.fan_out.remote(runs, 1) == [[homes[0]] for homes in first[1:]]

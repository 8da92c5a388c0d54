"""The controller as an actor of a real Ray cluster."""

import asyncio
import os
import signal
from collections.abc import Iterator

import pytest

from pbkv_ray.config import ControllerOptions
from pbkv_ray.control.actor import ControllerHost, controller_name, renew_controller, start_controller, stop_controller
from pbkv_ray.control.client import ControllerClient
from pbkv_ray.core.actions import PublishForecast, RetireRun
from pbkv_ray.core.events import Batch, CallStarted, Event, Residency, RunEnded, RunStarted
from pbkv_ray.errors import UnavailableError

pytestmark = pytest.mark.ray

SWE = RunStarted("r1", "swe", 1.0, ("planner", "coder"), (("planner", "coder"),))
CALL = CallStarted("r1", "planner", 1, "c1", 1.0)


def batch(sequence: int, *events: Event) -> Batch:
    return Batch("runner", sequence, events)


@pytest.fixture
def application(ray_cluster: None, request: pytest.FixtureRequest) -> Iterator[str]:
    name = f"test-{request.node.name}"
    start_controller(name, ControllerOptions())
    yield name
    stop_controller(name)


async def test_a_replica_hears_of_forecasts_and_endings_and_acknowledges_by_asking_again(application: str):
    client = ControllerClient(application, timeout_s=30.0)
    assert await client.hints("a", "epoch-1", wait_s=0.01) == ()  # introduces the replica
    asked = asyncio.create_task(client.hints("a", "epoch-1", wait_s=30.0))
    await ControllerClient(application, timeout_s=30.0).send(batch(0, SWE, CALL))
    (published,) = await asked
    assert isinstance(published, PublishForecast)
    assert (published.run_id, published.version, published.forecast.agents[:2]) == ("r1", 1, ("planner", "coder"))
    await client.send(batch(2, RunEnded("r1", "completed", 2.0)))
    assert await client.hints("a", "epoch-1", wait_s=30.0) == (RetireRun("r1", 2.0),)
    assert await client.hints("a", "epoch-1", wait_s=0.01) == ()
    counts = await client.counts()
    assert (counts["runs_completed"], counts["runs_active"], counts["hints_waiting"]) == (1, 0, 0)


async def test_whoever_watches_gets_runs_replicas_and_pools_in_one_answer(application: str):
    client = ControllerClient(application, timeout_s=30.0)
    await client.hints("a", "epoch-1", wait_s=0.01)
    await client.send(batch(0, SWE, CALL))
    await client.report(Residency("a", "epoch-1", 1.0, {"r1": (30, 0)}), {"device_pool": 64, "device_free": 34})
    seen = await client.live(10)
    assert [(row["run_id"], row["now"]) for row in seen["runs"]["rows"]] == [("r1", ["planner"])]
    (replica,) = seen["replicas"]
    assert replica["device"] == {"pool": 64, "free": 34, "retired": 0, "used": 30, "pieces": [("r1", 30)]}


async def test_two_applications_have_controllers_of_their_own(application: str):
    other = application + "-other"
    start_controller(other, ControllerOptions())
    try:
        await ControllerClient(application, timeout_s=30.0).send(batch(0, SWE))
        assert len(await ControllerClient(application, timeout_s=30.0).runs()) == 1
        assert await ControllerClient(other, timeout_s=30.0).runs() == []
    finally:
        stop_controller(other)


async def test_a_controller_of_other_options_is_replaced_when_the_application_starts_anew(application: str):
    client = ControllerClient(application, timeout_s=30.0)
    await client.send(batch(0, SWE))
    assert await asyncio.to_thread(renew_controller, application, ControllerOptions(), 30.0) is False
    assert len(await client.runs()) == 1
    other = ControllerOptions(lease_s=60.0)
    assert await asyncio.to_thread(renew_controller, application, other, 30.0) is True
    start_controller(application, other)
    assert await ControllerClient(application, timeout_s=30.0).runs() == []
    assert await asyncio.to_thread(renew_controller, application + "-nobody", other) is False


async def test_a_killed_controller_comes_back_empty_and_everyone_is_told(application: str):
    import ray

    restarted = asyncio.Event()
    client = ControllerClient(application, timeout_s=30.0, on_new_epoch=restarted.set)
    await client.send(batch(0, SWE, CALL))
    actor = ray.get_actor(controller_name(application), namespace="pbkv")
    pid = await actor.__ray_call__.remote(lambda self: os.getpid())
    os.kill(pid, signal.SIGKILL)

    async def until_sent(sent: Batch) -> None:
        while True:
            try:
                return await client.send(sent)
            except UnavailableError:
                await asyncio.sleep(0.05)  # as the pump does

    async with asyncio.timeout(60):
        await until_sent(batch(2, RunEnded("r1", "completed", 2.0)))
    assert restarted.is_set()
    # The end was reported during the outage, of a run that the new controller never knew: retired all the same.
    assert (await client.counts())["runs_completed"] == 1


async def test_a_controller_that_is_not_there_is_named_in_the_error(ray_cluster: None):
    with pytest.raises(UnavailableError, match="pbkv-controller-nobody did not answer counts"):
        await ControllerClient("nobody").counts()


async def test_the_host_needs_no_ray():
    host = ControllerHost(ControllerOptions())
    epoch = await host.events(batch(0, SWE))
    assert (await host.events(batch(1, RunEnded("r1", "failed", 2.0)))) == epoch
    assert await host.outcome("r1") == "failed"

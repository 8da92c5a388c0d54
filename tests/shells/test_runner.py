import pytest

from deployments.service import RunRequest
from pbkv_ray.errors import ConflictError, InputError, NotFoundError
from tests.shells.runner_kit import Kit
from tests.shells.store_urls import BACKENDS, fresh_database


@pytest.fixture(params=BACKENDS)
async def kit(request, tmp_path):
    async for url in fresh_database(request.param, tmp_path):
        async with Kit(url) as kit:
            yield kit


def request(task="hello", workflow="chain", **given):
    return RunRequest(workflow, {"task": task}, **given)


async def test_a_run_goes_through_its_graph_and_leaves_values_calls_and_events(kit):
    runner = await kit.runner()
    run = await runner.create_run(request("hello"))
    values = await runner.wait_run(None, run["run_id"])

    assert values == {"task": "hello", "said": ["plan:plan", "write:hello"]}
    ended = await runner.get_run(None, run["run_id"])
    assert (ended["status"], ended["attempt"], ended["assistant_id"]) == ("success", 1, "chain")
    calls = await runner.run_calls(run["run_id"])
    assert [(c["order"], c["agent"], c["step"], c["prompt_tokens"], c["device_cached_tokens"]) for c in calls] == [
        (1, "plan", 1, 10, 4),
        (2, "write", 2, 10, 4),
    ]
    names = [event.event async for event in runner.stream_run(None, run["run_id"], 0)]
    assert names == ["metadata", "values", "values", "values", "end"]
    thread = await runner.get_thread(run["thread_id"])
    assert (thread["status"], thread["values"]) == ("idle", values)


async def test_cancelling_stops_the_llm_call(kit):
    runner = await kit.runner()
    run = await runner.create_run(request("wait"))
    await kit.transport.waiting.wait()
    await runner.cancel_run(None, run["run_id"], "interrupt")

    assert kit.transport.aborted == ["write"]
    assert (await runner.get_run(None, run["run_id"]))["status"] == "interrupted"
    assert [type(event).__name__ for event in kit.emitted][-3:] == ["CallFinished", "AgentLeft", "RunEnded"]


async def test_what_cannot_be_run_is_refused(kit):
    runner = await kit.runner()
    with pytest.raises(NotFoundError, match="nope"):
        await runner.create_run(request(workflow="nope"))
    with pytest.raises(InputError, match="task"):
        await runner.create_run(RunRequest("chain", {"tsk": "x"}))
    with pytest.raises(NotFoundError, match="thread 'x' does not exist"):
        await runner.create_run(request(thread_id="x"))


async def test_a_busy_thread_rejects_by_default(kit):
    runner = await kit.runner()
    thread = (await runner.create_thread(None, {}, "raise"))["thread_id"]
    await runner.create_run(request("wait", thread_id=thread))
    with pytest.raises(ConflictError, match="busy"):
        await runner.create_run(request(thread_id=thread))

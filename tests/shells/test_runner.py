"""Runs from their request to their end, on one runner."""

import asyncio
import json
from dataclasses import replace

import pytest

from deployments.service import RunRequest
from pbkv_ray.core.events import AgentEntered, AgentLeft, CallFinished, CallStarted, RunEnded, RunStarted
from pbkv_ray.errors import ConflictError, InputError, NotFoundError, UnavailableError
from tests.shells.runner_kit import QUICK, Kit, request
from tests.shells.store_urls import BACKENDS, fresh_database


@pytest.fixture(params=BACKENDS)
async def kit(request, tmp_path):
    async for url in fresh_database(request.param, tmp_path):
        async with Kit(url) as kit:
            yield kit


async def test_a_run_goes_through_its_graph_and_leaves_values_calls_and_events(kit):
    runner = await kit.runner()
    run = await runner.create_run(request("hello"))
    assert (run["status"], run["multitask_strategy"]) == ("pending", "reject")
    values = await runner.wait_run(None, run["run_id"])

    assert values == {"task": "hello", "said": ["plan:plan", "write:hello"]}
    ended = await runner.get_run(run["thread_id"], run["run_id"])
    assert (ended["status"], ended["attempt"], ended["assistant_id"]) == ("success", 1, "chain")
    calls = await runner.run_calls(run["run_id"])
    read = ("order", "agent", "step", "prompt_tokens", "device_cached_tokens", "host_cached_tokens", "replica")
    assert [tuple(call[name] for name in read) for call in calls] == [
        (1, "plan", 1, 10, 4, 1, "replica-1"),
        (2, "write", 2, 10, 4, 1, "replica-1"),
    ]
    thread = await runner.get_thread(run["thread_id"])
    assert (thread["status"], thread["values"], thread["interrupts"]) == ("idle", values, {})
    assert await runner.list_runs(None, "success", 10, 0) == [ended]
    assert await runner.list_runs(None, "error", 10, 0) == []


async def test_the_life_cycle_is_told_in_order(kit):
    runner = await kit.runner()
    run = await runner.create_run(request("hello", cache_salt="tenant-1"))
    await runner.wait_run(None, run["run_id"])

    assert [type(event) for event in kit.emitted] == [
        RunStarted,
        *[AgentEntered, CallStarted, CallFinished, AgentLeft] * 2,
        RunEnded,
    ]
    started, ended = kit.emitted[0], kit.emitted[-1]
    assert (started.workflow, started.agents) == ("chain", ("plan", "write"))
    assert ("plan", "write") in started.edges
    assert (ended.run_id, ended.outcome) == (run["run_id"], "completed")
    assert {call.cache_salt for call in kit.transport.calls} == {"tenant-1"}


async def test_cancelling_stops_the_llm_call(kit):
    runner = await kit.runner()
    run = await runner.create_run(request("wait"))
    await kit.transport.waiting.wait()
    await runner.cancel_run(None, run["run_id"], "interrupt")

    assert kit.transport.aborted == ["write"]
    assert (await runner.get_run(None, run["run_id"]))["status"] == "interrupted"
    assert [type(event) for event in kit.emitted][-3:] == [CallFinished, AgentLeft, RunEnded]
    assert kit.emitted[-1].outcome == "cancelled"
    said = {"__error__": {"error": "UserInterrupt", "message": "the run was cancelled"}}
    assert await runner.wait_run(None, run["run_id"]) == said
    await runner.cancel_run(None, run["run_id"], "interrupt")  # nothing to do any more
    assert (await runner.get_thread(run["thread_id"]))["status"] == "interrupted", "it may go on from plan"


async def test_a_controller_that_restarted_hears_of_the_runs_in_flight_only(kit):
    runner = await kit.runner()
    over = await runner.create_run(request("hello"))
    await runner.wait_run(None, over["run_id"])
    run = await runner.create_run(request("wait"))
    await kit.transport.waiting.wait()
    told = len(kit.emitted)
    runner.announce()
    (again,) = kit.emitted[told:]
    assert (again.run_id, again.workflow, again.agents) == (run["run_id"], "chain", ("plan", "write"))


async def test_a_waiting_run_is_cancelled_before_it_starts(kit):
    runner = await kit.runner(replace(QUICK, max_running=1))
    first = await runner.create_run(request("wait"))
    await kit.transport.waiting.wait()
    second = await runner.create_run(request("never"))
    await runner.cancel_run(None, second["run_id"], "interrupt")
    assert (await runner.get_run(None, second["run_id"]))["status"] == "interrupted"
    third = await runner.create_run(request("never"))
    await runner.cancel_run(None, third["run_id"], "rollback")
    with pytest.raises(NotFoundError):
        await runner.get_run(None, third["run_id"])

    kit.transport.let_go.set()
    assert (await runner.wait_run(None, first["run_id"]))["said"] == ["plan:plan", "write:wait"]
    assert kit.transport.agents == ["plan", "write"]


async def test_a_failing_node_fails_the_run_with_its_words(kit):
    runner = await kit.runner()
    run = await runner.create_run(request("fail"))
    said = {"error": "RuntimeError", "message": "the node broke"}
    assert await runner.wait_run(None, run["run_id"]) == {"__error__": said}
    ended = await runner.get_run(None, run["run_id"])
    assert (ended["status"], ended["error"]) == ("error", said)
    events = [event async for event in runner.stream_run(None, run["run_id"], 0)]
    assert (events[-1].event, json.loads(events[-1].data)) == ("error", said)
    thread = await runner.get_thread(run["thread_id"])
    assert (thread["status"], thread["values"]) == ("error", {"task": "fail", "said": ["plan:plan"]})
    assert kit.emitted[-1].outcome == "failed"


async def test_a_run_that_takes_too_long_is_stopped(kit):
    runner = await kit.runner(replace(QUICK, run_timeout_s=0.05))
    run = await runner.create_run(request("wait"))
    assert (await runner.wait_run(None, run["run_id"]))["__error__"]["error"] == "RunTimeout"
    assert (await runner.get_run(None, run["run_id"]))["status"] == "timeout"
    assert kit.emitted[-1].outcome == "cancelled"


async def test_what_cannot_be_run_is_refused_with_a_remedy(kit):
    runner = await kit.runner()
    thread = (await runner.create_thread("conversation", {}, "raise"))["thread_id"]
    refused = [
        (NotFoundError, "workflow 'nope'", request(workflow="nope")),
        (InputError, "task: Field required", RunRequest("chain", {})),
        (InputError, "tsk: Extra inputs", RunRequest("chain", {"task": "x", "tsk": "x"})),
        (NotFoundError, "thread 'x' does not exist", request(thread_id="x")),
        (InputError, "slash", request(thread_id="a/b")),
        (InputError, "stream_mode tools", request(stream_mode=("tools",))),
        (InputError, "recursion_limit is 'many'", request(config={"recursion_limit": "many"})),
        (InputError, "needs an input", RunRequest("chain", None)),
        (InputError, "one of them", request(thread_id=thread, command={"resume": 1})),
        (InputError, "needs the thread", RunRequest("chain", None, command={"resume": 1})),
        (InputError, "command has go", RunRequest("chain", None, thread_id=thread, command={"go": 1})),
        (InputError, "NUL", request(metadata={"name": "\0"})),
    ]
    for error, said, asked in refused:
        with pytest.raises(error, match=said):
            await runner.create_run(asked)
    assert await runner.list_runs(None, None, 10, 0) == []
    nothing = await runner.create_run(RunRequest("chain", None, thread_id=thread))
    assert "nothing to go on with" in (await runner.wait_run(None, nothing["run_id"]))["__error__"]["message"]


async def test_a_full_queue_refuses_and_says_so(kit):
    runner = await kit.runner(replace(QUICK, max_running=1, max_pending=1))
    await runner.create_run(request("wait"))
    await kit.transport.waiting.wait()
    await runner.create_run(request())
    with pytest.raises(UnavailableError, match="1 runs wait already"):
        await runner.create_run(request())
    assert 'pbkv_runs_refused_total{reason="full"} 1.0' in runner.metrics_text()


async def test_a_stateless_run_may_leave_no_thread_but_always_its_record(kit):
    runner = await kit.runner()
    run = await runner.create_run(request("hello", keep_thread=False))
    values = await runner.wait_run(None, run["run_id"])
    await kit.no_active(runner)
    with pytest.raises(NotFoundError):
        await runner.get_thread(run["thread_id"])
    assert [item async for item in kit.checkpointer.alist({"configurable": {"thread_id": run["thread_id"]}})] == []
    assert (await runner.get_run(run["thread_id"], run["run_id"]))["status"] == "success"
    assert await runner.wait_run(None, run["run_id"]) == values


async def test_old_runs_and_their_threads_are_pruned(kit):
    runner = await kit.runner()
    old = await runner.create_run(request())
    await runner.wait_run(None, old["run_id"])
    kit.clock.now += 1_000
    young = await runner.create_run(request())
    await runner.wait_run(None, young["run_id"])

    assert await runner.prune(500) == {"runs": 1, "threads": 1}
    assert [run["run_id"] for run in await runner.list_runs(None, None, 10, 0)] == [young["run_id"]]
    with pytest.raises(NotFoundError):
        await runner.get_thread(old["thread_id"])
    assert [item async for item in kit.checkpointer.alist({"configurable": {"thread_id": old["thread_id"]}})] == []


async def test_pruning_goes_on_by_itself(kit):
    runner = await kit.runner(replace(QUICK, retention_s=500, prune_every_s=0.02))
    run = await runner.create_run(request())
    await runner.wait_run(None, run["run_id"])
    kit.clock.now += 1_000
    while await runner.list_runs(None, None, 1, 0):
        await asyncio.sleep(0.01)


async def test_deleting_a_run_waits_for_its_end(kit):
    runner = await kit.runner()
    run = await runner.create_run(request("wait"))
    await kit.transport.waiting.wait()
    with pytest.raises(ConflictError, match="has not ended"):
        await runner.delete_run(run["thread_id"], run["run_id"])
    await runner.cancel_run(None, run["run_id"], "interrupt")
    await runner.delete_run(run["thread_id"], run["run_id"])
    assert await runner.list_runs(None, None, 10, 0) == []


async def test_what_a_runner_counts(kit):
    runner = await kit.runner()
    for task in ("hello", "fail"):
        run = await runner.create_run(request(task))
        await runner.wait_run(None, run["run_id"])
    text = runner.metrics_text()
    for line in (
        'pbkv_runs_created_total{workflow="chain"} 2.0',
        'pbkv_runs_ended_total{status="success",workflow="chain"} 1.0',
        'pbkv_runs_ended_total{status="error",workflow="chain"} 1.0',
        'pbkv_run_seconds_count{workflow="chain"} 2.0',
        "pbkv_runs_lost_total 0.0",
    ):
        assert line in text.splitlines()


async def test_a_lost_life_cycle_event_costs_no_run(kit):
    def broken(event):
        raise RuntimeError("no controller")

    runner = await kit.runner(emit=broken)
    run = await runner.create_run(request("hello"))
    assert (await runner.wait_run(None, run["run_id"]))["said"] == ["plan:plan", "write:hello"]
    assert "pbkv_emit_errors_total 10.0" in runner.metrics_text()


async def test_a_workflow_shows_its_graph_and_its_schemas(kit):
    runner = kit.idle_runner()
    graph = await runner.graph_json("chain")
    assert [node["id"] for node in graph["nodes"]] == ["__start__", "plan", "write", "__end__"]
    schemas = await runner.graph_schemas("chain")
    assert schemas["input_schema"]["required"] == ["task"]
    assert set(schemas["state_schema"]["properties"]) == {"task", "said"}

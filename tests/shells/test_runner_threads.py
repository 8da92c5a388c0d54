"""Conversations: several runs on a thread, people who answer, histories, and ways back."""

import psycopg
import pytest

from deployments.service import RunRequest
from pbkv_ray.errors import ConflictError, InputError, NotFoundError, StoreError
from tests.shells.runner_kit import Kit, request
from tests.shells.store_urls import BACKENDS, fresh_database


@pytest.fixture(params=BACKENDS)
async def kit(request, tmp_path):
    async for url in fresh_database(request.param, tmp_path):
        async with Kit(url) as kit:
            yield kit


@pytest.fixture
async def runner(kit):
    return await kit.runner()


@pytest.fixture
async def thread(runner):
    return (await runner.create_thread(None, {}, "raise"))["thread_id"]


async def finish(runner, asked):
    run = await runner.create_run(asked)
    return await runner.wait_run(None, run["run_id"])


async def busy(kit, runner, thread):
    """A run of the thread that waits in its second LLM call."""
    run = await runner.create_run(request("wait", thread_id=thread))
    await kit.transport.waiting.wait()
    return run


async def statuses(runner, thread):
    return [run["status"] for run in reversed(await runner.list_runs(thread, None, 10, 0))]


async def test_a_busy_thread_rejects_by_default(kit, runner, thread):
    await busy(kit, runner, thread)
    assert (await runner.get_thread(thread))["status"] == "busy"
    with pytest.raises(ConflictError, match=f"{thread!r} is busy"):
        await runner.create_run(request(thread_id=thread))
    assert 'pbkv_runs_refused_total{reason="busy"} 1.0' in runner.metrics_text()


async def test_an_enqueued_run_starts_when_the_thread_is_free_and_sees_what_was_said(kit, runner, thread):
    first = await busy(kit, runner, thread)
    second = await runner.create_run(request("two", thread_id=thread, multitask="enqueue"))
    assert await statuses(runner, thread) == ["running", "pending"]
    kit.transport.let_go.set()
    values = await runner.wait_run(None, second["run_id"])
    assert values["said"] == ["plan:plan", "write:wait", "plan:plan", "write:two"]
    assert (await runner.get_run(thread, first["run_id"]))["status"] == "success"


async def test_an_interrupting_run_stops_the_other_and_goes_on_from_where_it_was(kit, runner, thread):
    await busy(kit, runner, thread)
    values = await finish(runner, request("two", thread_id=thread, multitask="interrupt"))
    assert kit.transport.aborted == ["write"]
    assert await statuses(runner, thread) == ["interrupted", "success"]
    assert values["said"] == ["plan:plan", "plan:plan", "write:two"], "the first plan was kept"


async def test_a_run_with_rollback_undoes_the_other(kit, runner, thread):
    await finish(runner, request("zero", thread_id=thread))
    await busy(kit, runner, thread)
    values = await finish(runner, request("two", thread_id=thread, multitask="rollback"))
    assert kit.transport.aborted == ["write"]
    assert await statuses(runner, thread) == ["success", "success"], "of the second run nothing is left"
    assert values["said"] == ["plan:plan", "write:zero", "plan:plan", "write:two"]


async def test_rolling_back_the_only_run_empties_the_thread(kit, runner, thread):
    run = await busy(kit, runner, thread)
    await runner.cancel_run(thread, run["run_id"], "rollback")
    with pytest.raises(NotFoundError):
        await runner.get_run(thread, run["run_id"])
    assert (await runner.thread_state(thread, None))["values"] == {}
    assert (await runner.get_thread(thread))["status"] == "idle"


async def test_a_person_is_asked_and_answers(kit, runner, thread):
    values = await finish(runner, request("ship it?", "asking", thread_id=thread))
    (asked,) = values["__interrupt__"]
    assert asked["value"] == {"question": "ship it?"}
    waiting = await runner.get_thread(thread)
    assert waiting["status"] == "interrupted"
    assert list(waiting["interrupts"].values()) == [[asked]]
    state = await runner.thread_state(thread, None)
    assert (state["next"], [task["name"] for task in state["tasks"]]) == (["approve"], ["approve"])
    assert state["interrupts"] == [asked]
    assert await statuses(runner, thread) == ["interrupted"]
    assert kit.emitted[-1].outcome == "interrupted"

    answer = RunRequest("asking", None, thread_id=thread, command={"resume": "yes"})
    assert (await finish(runner, answer))["said"] == ["plan:ship it?", "approved:yes"]
    assert await statuses(runner, thread) == ["interrupted", "success"]
    assert (await runner.get_thread(thread))["interrupts"] == {}
    assert kit.transport.agents == ["plan"], "what was done is not done again"


async def test_a_rolled_back_run_leaves_the_question_before_it_open(kit, runner, thread):
    asked = (await finish(runner, request("ship it?", "asking", thread_id=thread)))["__interrupt__"]
    run = await runner.create_run(request("wait", "asking", thread_id=thread))
    await kit.transport.waiting.wait()
    await runner.cancel_run(thread, run["run_id"], "rollback")

    again = await runner.get_thread(thread)
    assert (again["status"], again["values"]) == ("interrupted", {"task": "ship it?", "said": ["plan:ship it?"]})
    (question,) = (one for several in again["interrupts"].values() for one in several)
    assert question["value"] == asked[0]["value"]
    answer = RunRequest("asking", None, thread_id=thread, command={"resume": {question["id"]: "yes"}})
    assert (await finish(runner, answer))["said"] == ["plan:ship it?", "approved:yes"]


async def test_a_run_stops_before_a_graph_node_and_the_next_goes_on(kit, runner, thread):
    values = await finish(runner, request("x", thread_id=thread, interrupt_before=("write",)))
    assert values == {"task": "x", "said": ["plan:plan"]}
    assert (await runner.get_thread(thread))["status"] == "interrupted"
    values = await finish(runner, RunRequest("chain", None, thread_id=thread))
    assert values["said"] == ["plan:plan", "write:x"]
    values = await finish(runner, request("y", thread_id=thread, interrupt_after=("*",)))
    assert values["said"] == ["plan:plan", "write:x", "plan:plan"]


async def test_history_tells_the_steps_and_a_run_may_start_from_one(kit, runner, thread):
    await finish(runner, request("x", thread_id=thread))
    history = await runner.thread_history(thread, 10, None)
    assert [(state["next"], state["values"].get("said", [])) for state in history] == [
        ([], ["plan:plan", "write:x"]),
        (["write"], ["plan:plan"]),
        (["plan"], []),
        (["__start__"], []),
    ]
    before_write = history[1]["checkpoint"]["checkpoint_id"]
    assert (await runner.thread_state(thread, before_write))["next"] == ["write"]
    assert await runner.thread_history(thread, 10, before_write) == history[2:]
    assert history[0]["parent_checkpoint"]["checkpoint_id"] == before_write

    again = RunRequest("chain", None, thread_id=thread, config={"configurable": {"checkpoint_id": before_write}})
    assert (await finish(runner, again))["said"] == ["plan:plan", "write:x"]
    assert kit.transport.agents == ["plan", "write", "write"]
    with pytest.raises(NotFoundError, match="no checkpoint"):
        await runner.thread_state(thread, "1ef00000-0000-0000-0000-000000000000")


async def test_a_state_is_edited_by_hand_when_the_thread_is_idle(kit, runner, thread):
    with pytest.raises(ConflictError, match="no run"):
        await runner.update_state(thread, {"said": ["x"]}, None)
    await finish(runner, request("x", thread_id=thread, interrupt_before=("write",)))
    await runner.update_state(thread, {"task": "y"}, "plan")
    with pytest.raises(InputError, match="refuses the update"):
        await runner.update_state(thread, {"task": "y"}, "nobody")
    assert (await runner.get_thread(thread))["values"]["task"] == "y"
    assert (await finish(runner, RunRequest("chain", None, thread_id=thread)))["said"] == ["plan:plan", "write:y"]
    await busy(kit, runner, thread)
    with pytest.raises(ConflictError, match="busy"):
        await runner.update_state(thread, {"task": "z"}, "plan")


async def test_threads_are_made_found_changed_and_deleted(kit, runner):
    made = await runner.create_thread("mine", {"user": "ann"}, "raise")
    assert (made["status"], made["metadata"], made["values"]) == ("idle", {"user": "ann"}, None)
    with pytest.raises(ConflictError):
        await runner.create_thread("mine", {}, "raise")
    assert await runner.create_thread("mine", {}, "do_nothing") == made
    await finish(runner, request("x", thread_id="mine"))
    changed = await runner.update_thread("mine", {"mood": "good"})
    assert changed["metadata"] == {"graph_id": "chain", "assistant_id": "chain", "user": "ann", "mood": "good"}
    await runner.create_run(request("stateless"))
    assert [t["thread_id"] for t in await runner.search_threads({"user": "ann"}, "idle", 10, 0)] == ["mine"]
    assert [t["thread_id"] for t in await runner.search_threads({}, None, 10, 0)] == ["mine"]

    await runner.delete_thread("mine")
    with pytest.raises(NotFoundError):
        await runner.get_thread("mine")
    assert [item async for item in kit.checkpointer.alist({"configurable": {"thread_id": "mine"}})] == []
    with pytest.raises(NotFoundError):
        await runner.list_runs("mine", None, 10, 0)


async def test_checkpoints_out_of_reach_are_said_to_be(kit, runner, thread, monkeypatch):
    await finish(runner, request("x", thread_id=thread))

    async def away(*given):
        raise psycopg.OperationalError("connection refused\nIs the server running?")

    monkeypatch.setattr(kit.checkpointer, "aget_tuple", away)
    with pytest.raises(StoreError, match=r"does not answer \(connection refused\); try again"):
        await runner.thread_state(thread, None)


async def test_a_thread_in_use_is_not_deleted(kit, runner, thread):
    await busy(kit, runner, thread)
    with pytest.raises(ConflictError, match="in flight"):
        await runner.delete_thread(thread)

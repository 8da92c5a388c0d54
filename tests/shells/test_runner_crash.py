"""Runners that die, hang, shut down or share: no run is lost, done twice at a time, or "running" for ever."""

import asyncio
import json
import sys
from dataclasses import replace

import psycopg
import pytest

from pbkv_ray.core.events import RunEnded, RunStarted
from pbkv_ray.errors import EngineLostError, StoreError
from pbkv_ray.store import Ending, NewRun
from tests.shells.runner_kit import QUICK, FakeTransport, Kit, request
from tests.shells.store_urls import BACKENDS, fresh_database

HOUR = 3_600


@pytest.fixture(params=BACKENDS)
async def kit(request, tmp_path):
    async for url in fresh_database(request.param, tmp_path):
        async with Kit(url) as kit:
            yield kit


async def attempts(runner, run_id):
    """The attempts that the run's stream names."""
    events = [event async for event in runner.stream_run(None, run_id, 0)]
    return [json.loads(event.data)["attempt"] for event in events if event.event == "metadata"]


async def claimed_by_the_dead(kit, runner, asked, times=1):
    """A run that `times` runners claimed and took to their graves before anything of it ran."""
    run = await runner.create_run(asked)
    dead = await kit.store.runs.claim(run["run_id"], "dead", lease_until=kit.clock.now + 5, now=kit.clock.now)
    for _ in range(times - 1):
        kit.clock.now += 6
        dead = await kit.store.runs.take_over(dead, "dead", lease_until=kit.clock.now + 5, now=kit.clock.now)
    kit.clock.now += 6
    return run


async def test_a_runner_is_killed_and_the_next_goes_on_from_the_checkpoint(kit):
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.shells.crashing_runner", kit.url, stdout=asyncio.subprocess.PIPE
    )
    run_id = (await process.stdout.readline()).decode().strip()
    process.kill()
    await process.wait()

    kit.clock.now += HOUR
    kit.transport.let_go.set()
    runner = await kit.runner()
    values = await runner.wait_run(None, run_id)
    assert values["said"] == ["plan:plan", "write:wait for the end"]
    assert kit.transport.agents == ["write"], "plan was done and is not done again"
    assert (await runner.get_run(None, run_id))["attempt"] == 2
    assert await attempts(runner, run_id) == [1, 2]
    assert [call["attempt"] for call in await runner.run_calls(run_id)] == [1, 2]


async def test_a_run_of_which_nothing_ran_starts_anew(kit):
    runner = kit.idle_runner()
    run = await claimed_by_the_dead(kit, runner, request("hello"))
    living = await kit.runner()
    assert (await living.wait_run(None, run["run_id"]))["said"] == ["plan:plan", "write:hello"]
    assert await attempts(living, run["run_id"]) == [2]
    assert "pbkv_runs_taken_over_total 1.0" in living.metrics_text()


async def test_a_run_that_had_stopped_before_a_graph_node_stays_there(kit):
    first = kit.idle_runner()
    await first.start()
    run = await first.create_run(request("x", interrupt_before=("write",)))
    await first.wait_run(None, run["run_id"])
    await first.close()
    await kit.forget_the_end(run["run_id"])  # as if the runner had died just before it stored the end
    second = await kit.runner()
    assert (await second.wait_run(None, run["run_id"]))["said"] == ["plan:plan"]
    assert (await second.get_run(None, run["run_id"]))["attempt"] == 2
    assert kit.transport.agents == ["plan"]


async def test_a_run_that_had_finished_is_only_ended(kit):
    first = kit.idle_runner()
    await first.start()
    run = await first.create_run(request("x"))
    values = await first.wait_run(None, run["run_id"])
    await first.close()
    await kit.forget_the_end(run["run_id"])
    second = await kit.runner()
    assert await second.wait_run(None, run["run_id"]) == values
    assert kit.transport.agents == ["plan", "write"]


async def test_a_run_that_kills_its_runners_is_given_up_and_its_thread_set_free(kit):
    runner = kit.idle_runner()
    thread = (await runner.create_thread(None, {}, "raise"))["thread_id"]
    run = await claimed_by_the_dead(kit, runner, request("poison", thread_id=thread), times=3)
    living = await kit.runner()
    said = (await living.wait_run(None, run["run_id"]))["__error__"]
    assert (said["error"], said["message"][:29]) == ("RunnerLost", "3 runners died or hung while ")
    assert (await living.get_thread(thread))["status"] == "error"
    assert kit.emitted == [RunEnded(run["run_id"], "failed", kit.clock.now)]
    again = await living.create_run(request("hello", thread_id=thread))
    assert (await living.wait_run(None, again["run_id"]))["said"] == ["plan:plan", "write:hello"]


async def test_what_a_dead_runner_was_asked_to_stop_is_stopped(kit):
    runner = kit.idle_runner()
    run = await claimed_by_the_dead(kit, runner, request("hello"), times=3)
    await kit.store.runs.ask_stop(run["run_id"], "interrupt", kit.clock.now)
    living = await kit.runner()
    assert (await living.wait_run(None, run["run_id"]))["__error__"]["error"] == "UserInterrupt"
    assert kit.transport.calls == []


async def test_a_runner_that_shuts_down_hands_its_runs_over(kit):
    first = kit.idle_runner()
    await first.start()
    run = await first.create_run(request("wait"))
    await kit.transport.waiting.wait()
    await first.close()
    assert kit.transport.aborted == ["write"]
    waiting = await first.get_run(None, run["run_id"])
    assert (waiting["status"], waiting["attempt"]) == ("pending", 0)
    assert not any(isinstance(event, RunEnded) for event in kit.emitted), "it goes on elsewhere"

    kit.transport.let_go.set()
    second = await kit.runner()
    assert (await second.wait_run(None, run["run_id"]))["said"] == ["plan:plan", "write:wait"]
    assert kit.transport.agents == ["plan", "write", "write"]
    assert [type(e) for e in kit.emitted if isinstance(e, RunStarted | RunEnded)] == [RunStarted, RunStarted, RunEnded]


async def test_a_run_handed_over_can_still_be_rolled_back(kit):
    first = kit.idle_runner()
    await first.start()
    run = await first.create_run(request("wait"))
    await kit.transport.waiting.wait()
    await first.close()
    second = kit.idle_runner()
    second_started = asyncio.create_task(second.start())
    await second_started
    await second.cancel_run(None, run["run_id"], "rollback")
    assert await second.list_runs(None, None, 10, 0) == []
    assert (await second.thread_state(run["thread_id"], None))["values"] == {}
    await second.close()


async def test_a_runner_that_lost_its_lease_lets_go_and_says_nothing(kit):
    runner = await kit.runner()
    run = await runner.create_run(request("wait"))
    await kit.transport.waiting.wait()
    told = len(kit.emitted)
    late = kit.clock.now + 6
    stolen = await kit.store.runs.take_over(
        await kit.store.runs.get(run["run_id"]), "other", lease_until=late + HOUR, now=late
    )
    assert stolen is not None and stolen.owner == "other"
    kit.clock.now += 2  # time to renew
    await kit.no_active(runner)

    assert kit.transport.aborted == ["write"]
    ours = await kit.store.runs.get(run["run_id"])
    assert (ours.status, ours.owner) == ("running", "other")
    assert [type(event).__name__ for event in kit.emitted[told:]] == ["CallFinished"]
    assert "pbkv_runs_lost_total 1.0" in runner.metrics_text()
    assert await kit.store.runs.end(stolen, Ending("success", "idle"), late)


async def test_two_runners_share_the_work_and_do_nothing_twice(kit):
    transports = FakeTransport(), FakeTransport()
    few = replace(QUICK, max_running=3)
    runners = [await kit.runner(few, transport=transport) for transport in transports]
    made = [await runners[index % 2].create_run(request(f"task {index}")) for index in range(12)]
    values = await asyncio.gather(*(runners[0].wait_run(None, run["run_id"]) for run in made))

    assert [value["said"] for value in values] == [["plan:plan", f"write:task {index}"] for index in range(12)]
    done = [call.caller.run_id for transport in transports for call in transport.calls]
    assert sorted(done) == sorted(run["run_id"] for run in made for _ in ("plan", "write"))
    assert {run["attempt"] for run in await runners[1].list_runs(None, "success", 100, 0)} == {1}


async def test_a_run_is_cancelled_through_another_runner(kit):
    runner, other = await kit.runner(), kit.idle_runner()
    run = await runner.create_run(request("wait"))
    await kit.transport.waiting.wait()
    await other.cancel_run(None, run["run_id"], "interrupt")
    assert kit.transport.aborted == ["write"]
    assert (await other.get_run(None, run["run_id"]))["status"] == "interrupted"


async def test_a_run_outlasts_a_database_that_is_away_for_a_while(kit, monkeypatch):
    put, append = kit.checkpointer.aput, kit.store.events.append
    of_put = [None, None, psycopg.OperationalError("the server closed the connection")]
    of_append = [None, StoreError("away"), StoreError("away")]

    async def flaky_put(*given):
        if of_put and (failure := of_put.pop(0)) is not None:
            raise failure
        return await put(*given)

    async def flaky_append(*given):
        if of_append and (failure := of_append.pop(0)) is not None:
            raise failure
        return await append(*given)

    monkeypatch.setattr(kit.checkpointer, "aput", flaky_put)
    monkeypatch.setattr(kit.store.events, "append", flaky_append)
    runner = await kit.runner()
    run = await runner.create_run(request("hello"))
    assert (await runner.wait_run(None, run["run_id"]))["said"] == ["plan:plan", "write:hello"]
    assert (await runner.get_run(None, run["run_id"]))["attempt"] == 2
    assert await attempts(runner, run["run_id"]) == [1, 2]
    outcomes = [event.outcome for event in kit.emitted if isinstance(event, RunEnded)]
    assert outcomes == ["completed"], "the controller hears of one end"
    assert (of_put, of_append) == ([], [])
    assert "pbkv_store_errors_total 2.0" in runner.metrics_text()


async def test_an_engine_that_dies_in_an_answer_costs_the_run_that_step_only(kit, monkeypatch):
    stream, deaths = kit.transport.stream, [None, EngineLostError("the engine's replica died during the call")]

    async def dying(call):
        async for chunk in stream(call):
            if deaths and (death := deaths.pop(0)) is not None:
                raise death
            yield chunk

    monkeypatch.setattr(kit.transport, "stream", dying)
    runner = await kit.runner()
    run = await runner.create_run(request("hello"))
    assert (await runner.wait_run(None, run["run_id"]))["said"] == ["plan:plan", "write:hello"]
    assert kit.transport.agents == ["plan", "write", "write"], "plan is not done again"
    assert await attempts(runner, run["run_id"]) == [1, 2]
    assert [event.outcome for event in kit.emitted if isinstance(event, RunEnded)] == ["completed"]


async def test_a_run_whose_database_stays_away_fails_in_the_end(kit, monkeypatch):
    async def broken(*given):
        raise psycopg.OperationalError("the server closed the connection")

    monkeypatch.setattr(kit.checkpointer, "aput", broken)
    runner = await kit.runner()
    run = await runner.create_run(request("hello"))
    said = (await runner.wait_run(None, run["run_id"]))["__error__"]
    assert said == {"error": "OperationalError", "message": "the server closed the connection"}
    assert (await runner.get_run(None, run["run_id"]))["attempt"] == 3


async def test_finished_runs_outlive_their_runner_and_their_process(kit):
    first = kit.idle_runner()
    await first.start()
    run = await first.create_run(request("hello"))
    values = await first.wait_run(None, run["run_id"])
    before = [event async for event in first.stream_run(None, run["run_id"], 0)]
    await first.close()
    async with Kit(kit.url) as reopened:
        second = await reopened.runner()
        assert await second.wait_run(None, run["run_id"]) == values
        assert [event async for event in second.stream_run(None, run["run_id"], 0)] == before
        assert len(await second.run_calls(run["run_id"])) == 2


async def test_a_request_stored_by_another_version_is_read_as_far_as_it_goes(kit):
    await kit.store.threads.create("t", {}, 0.0)
    stored = json.dumps({"workflow": "chain", "input": {"task": "old"}, "thread_id": "t", "unheard_of": 1})
    await kit.store.runs.admit(NewRun("old", "t", "chain", "reject", stored), max_pending=10, now=0.0)
    runner = await kit.runner()
    assert (await runner.wait_run("t", "old"))["said"] == ["plan:plan", "write:old"]

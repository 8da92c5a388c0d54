"""What a client sees of a run while it goes on, after a broken connection, and from another runner."""

import asyncio
import json
from contextlib import aclosing

import pytest

from tests.shells.runner_kit import Kit, request
from tests.shells.store_urls import BACKENDS, fresh_database


@pytest.fixture(params=BACKENDS)
async def kit(request, tmp_path):
    async for url in fresh_database(request.param, tmp_path):
        async with Kit(url) as kit:
            yield kit


async def collect(runner, run, after=0):
    return [
        (event.seq, event.event, json.loads(event.data))
        async for event in runner.stream_run(None, run["run_id"], after)
    ]


async def test_a_stream_tells_the_run_from_its_name_to_its_end(kit):
    runner = await kit.runner()
    run = await runner.create_run(request("hello", stream_mode=("values", "updates")))
    name = run["run_id"]
    assert await collect(runner, run) == [
        (1, "metadata", {"run_id": name, "attempt": 1}),
        (2, "values", {"task": "hello", "said": []}),
        (3, "updates", {"plan": {"said": ["plan:plan"]}}),
        (4, "values", {"task": "hello", "said": ["plan:plan"]}),
        (5, "updates", {"write": {"said": ["write:hello"]}}),
        (6, "values", {"task": "hello", "said": ["plan:plan", "write:hello"]}),
        (7, "end", {"run_id": name, "status": "success"}),
    ]


async def test_a_stream_is_live_and_goes_on_where_it_broke(kit):
    runner = await kit.runner()
    run = await runner.create_run(request("wait"))
    seen = []
    async with aclosing(runner.stream_run(None, run["run_id"], 0)) as stream:
        async for event in stream:
            seen.append((event.seq, event.event))
            if len(seen) == 3:
                break  # the connection breaks while the run waits in its second call
    assert seen == [(1, "metadata"), (2, "values"), (3, "values")]
    assert (await runner.get_run(None, run["run_id"]))["status"] == "running", "nobody asked to stop it"

    rest = asyncio.create_task(collect(runner, run, after=seen[-1][0]))
    kit.transport.let_go.set()
    assert [(seq, event) for seq, event, _ in await rest] == [(4, "values"), (5, "end")]
    assert [seq for seq, _, _ in await collect(runner, run)] == [1, 2, 3, 4, 5], "and it can be told anew"
    assert await collect(runner, run, after=5) == []


async def test_any_number_of_clients_of_any_runner_see_the_same(kit):
    runner, other = await kit.runner(), kit.idle_runner()
    run = await runner.create_run(request("wait"))
    readers = [asyncio.create_task(collect(reader, run)) for reader in (runner, runner, other)]
    waiter = asyncio.create_task(other.wait_run(None, run["run_id"]))
    await kit.transport.waiting.wait()
    kit.transport.let_go.set()
    one, two, elsewhere = await asyncio.gather(*readers)
    assert one == two == elsewhere
    assert [event for _, event, _ in one] == ["metadata", "values", "values", "values", "end"]
    assert (await waiter)["said"] == ["plan:plan", "write:wait"]


async def test_leaving_a_stream_stops_the_run_only_if_it_was_asked_for(kit):
    runner = await kit.runner()
    run = await runner.create_run(request("wait", cancel_on_disconnect=True))
    async with aclosing(runner.stream_run(None, run["run_id"], 0)) as stream:
        await anext(stream)
        await kit.transport.waiting.wait()
    assert "UserInterrupt" in str(await runner.wait_run(None, run["run_id"]))
    assert kit.transport.aborted == ["write"]


async def test_a_task_that_reads_a_stream_and_is_cancelled_counts_as_leaving(kit):
    runner = await kit.runner()
    run = await runner.create_run(request("wait", cancel_on_disconnect=True))
    reader = asyncio.create_task(collect(runner, run))
    await kit.transport.waiting.wait()
    reader.cancel()
    assert "UserInterrupt" in str(await runner.wait_run(None, run["run_id"]))


async def test_a_cancelled_run_ends_its_streams_with_an_error(kit):
    runner = await kit.runner()
    for action, error in (("interrupt", "UserInterrupt"), ("rollback", "UserRollback")):
        run = await runner.create_run(request("wait"))
        reader = asyncio.create_task(collect(runner, run))
        waiter = asyncio.create_task(runner.wait_run(None, run["run_id"]))
        await kit.transport.waiting.wait()
        kit.transport.waiting.clear()
        await runner.cancel_run(None, run["run_id"], action)
        *_, last = await reader
        assert (last[1], last[2]["error"]) == ("error", error)
        assert (await waiter)["__error__"]["error"] == error


async def test_a_person_asked_is_in_the_stream(kit):
    runner = await kit.runner()
    run = await runner.create_run(request("ok?", "asking", stream_mode=("updates",)))
    (asked,) = [data["__interrupt__"] for _, event, data in await collect(runner, run) if "__interrupt__" in data]
    assert [interrupt["value"] for interrupt in asked] == [{"question": "ok?"}]


async def test_messages_come_as_pieces_or_as_wholes(kit):
    runner = await kit.runner()
    run = await runner.create_run(request("hi", "talking", stream_mode=("messages", "messages-tuple")))
    events = [(event, data) for _, event, data in await collect(runner, run)]
    names = [event for event, _ in events]
    spoken, written = ["messages", "messages/metadata", "messages/partial"], ["messages", "messages/metadata"]
    assert names == ["metadata", *spoken, *written, "messages/complete", "end"]
    (piece, where), (so_far,) = events[1][1], events[3][1]
    assert (piece["content"], piece["type"], where["langgraph_node"]) == ("speak:hi", "AIMessageChunk", "speak")
    assert (so_far["content"], so_far["id"], list(events[2][1])) == ("speak:hi", piece["id"], [piece["id"]])
    (message, _), (whole,) = events[4][1], events[6][1]
    assert (whole, whole["id"], whole["type"]) == (message, "message-1", "ai")


async def test_langchain_events_come_beside_the_other_modes(kit):
    runner = await kit.runner()
    run = await runner.create_run(request("hi", stream_mode=("events", "values")))
    events = await collect(runner, run)
    assert [data["said"] for _, event, data in events if event == "values"] == [
        [],
        ["plan:plan"],
        ["plan:plan", "write:hi"],
    ]
    started = [data["name"] for _, event, data in events if event == "events" and data["event"] == "on_chain_start"]
    assert started == ["chain", "plan", "write"]

    run = await runner.create_run(request("wait", stream_mode=("events",)))
    await kit.transport.waiting.wait()
    await runner.cancel_run(None, run["run_id"], "interrupt")
    assert kit.transport.aborted == ["write"]


async def test_a_long_run_keeps_a_bounded_stream(kit):
    runner = await kit.runner()
    run = await runner.create_run(request("100", "counting", stream_mode=("values", "custom")))
    values = await runner.wait_run(None, run["run_id"])
    assert len(values["said"]) == 1
    events = await collect(runner, run)
    ended = await runner.get_run(None, run["run_id"])
    assert len(events) <= 40 + 1
    assert (events[0][1], events[-1][1]) == ("metadata", "end")
    assert events[-1][0] == len(events) + ended["events_dropped"]
    assert events[-2][2] == {"task": "100", "said": ["counted"]}, "the newest state is there"
    assert 'pbkv_run_events_dropped_total{reason="run is full"} ' in runner.metrics_text()

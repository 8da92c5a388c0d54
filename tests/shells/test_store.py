"""The store alone: who may claim what, and what survives when two want the same."""

import asyncio

import pytest
from sqlalchemy import text, update

from pbkv_ray.errors import ConfigError, ConflictError, InputError, NotFoundError, UnavailableError
from pbkv_ray.store import Batch, CallRow, Ending, NewRun, Store
from pbkv_ray.store.database import Database
from pbkv_ray.store.schema import meta
from tests.shells.store_urls import BACKENDS, fresh_database

DONE = Ending("success", "idle", (("end", "{}"),), output='{"x": 1}', state='{"values": {"x": 1}, "interrupts": {}}')


@pytest.fixture(params=BACKENDS)
async def url(request, tmp_path):
    async for url in fresh_database(request.param, tmp_path):
        yield url


@pytest.fixture
async def store(url):
    store = await Store.open(url, max_events_per_run=10)
    yield store
    await store.close()


def new(run_id, thread_id="t", multitask="enqueue", **given):
    return NewRun(run_id, thread_id, "chain", multitask, "{}", **given)


async def admit(store, run_id, thread_id="t", multitask="enqueue", *, max_pending=100, now=1.0):
    return await store.runs.admit(new(run_id, thread_id, multitask), max_pending=max_pending, now=now)


async def claim(store, owner="me", now=10.0):
    """The first of the claimable runs that can still be had."""
    for run_id in await store.runs.claimable():
        if (run := await store.runs.claim(run_id, owner, lease_until=now + 5, now=now)) is not None:
            return run
    return None


async def test_runs_of_a_thread_go_one_after_the_other_in_order_of_arrival(store):
    await store.threads.create("t", {}, 0.0)
    for run_id in ("first", "second"):
        await admit(store, run_id)
    first = await claim(store)
    assert (first.run_id, first.status, first.owner, first.attempt) == ("first", "running", "me", 1)
    assert await claim(store) is None, "the thread is taken"

    assert await store.runs.end(first, DONE, 11.0)
    assert (await store.threads.get("t")).status == "busy", "the second one waits"
    second = await claim(store)
    assert second.run_id == "second"
    assert await store.runs.end(second, DONE, 12.0)
    thread = await store.threads.get("t")
    assert (thread.status, thread.state) == ("idle", DONE.state)


async def test_a_head_start_overtakes_who_came_just_before_and_nobody_who_has_waited_longer(store):
    for run_id, at_s, ahead_s in (("long", 0.0, 0.0), ("short", 50.0, 0.0), ("ahead", 100.0, 60.0)):
        await store.threads.create(run_id, {}, 0.0)
        await store.runs.admit(new(run_id, run_id, head_start_s=ahead_s), max_pending=9, now=at_s)
    assert await store.runs.queue() == ["long", "ahead", "short"]
    assert [(await claim(store, now=101.0)).run_id for _ in range(3)] == ["long", "ahead", "short"]


async def test_tables_of_the_version_before_are_upgraded_and_keep_their_runs(url):
    store = await Store.open(url)
    await store.threads.create("t", {}, 0.0)
    await admit(store, "old")
    await store.close()
    database = Database(url)
    async with database.write() as connection:
        await connection.execute(text("ALTER TABLE runs DROP COLUMN head_start_s"))
        await connection.execute(update(meta).values(value="1"))
    await database.close()
    opened = await asyncio.gather(Store.open(url), Store.open(url))  # two runners start at once
    assert [await store.runs.queue() for store in opened] == [["old"], ["old"]]
    assert (await claim(opened[0])).head_start_s == 0.0
    for store in opened:
        await store.close()


async def test_many_claimers_share_the_runs_without_a_double(store, url):
    other = await Store.open(url)
    for index in range(10):
        await store.threads.create(f"t{index}", {}, 0.0)
    for index in range(20):
        await admit(store, f"r{index}", f"t{index % 10}")

    async def claim_all(of, owner):
        return [run.run_id for _ in range(12) if (run := await claim(of, owner)) is not None]

    claimed = await asyncio.gather(claim_all(store, "a"), claim_all(store, "b"), claim_all(other, "c"))
    await other.close()
    assert sorted(run for part in claimed for run in part) == sorted(f"r{index}" for index in range(10)), (
        "one a thread, each once"
    )


async def test_a_run_ends_once_and_only_for_whom_it_belongs_to(store):
    await store.threads.create("t", {}, 0.0)
    await admit(store, "r")
    mine = await claim(store, "slow", now=10.0)
    (expired,) = await store.runs.expired(now=16.0)
    theirs = await store.runs.take_over(expired, "fast", lease_until=21.0, now=16.0)
    assert (theirs.owner, theirs.attempt) == ("fast", 2)
    assert await store.runs.take_over(expired, "late", lease_until=21.0, now=16.0) is None

    assert not await store.runs.end(mine, DONE, 17.0), "the slow one lost it"
    assert await store.runs.renew("slow", ["r"], lease_until=30.0, now=17.0) == {}
    assert await store.runs.renew("fast", ["r"], lease_until=30.0, now=17.0) == {"r": 2}
    assert await store.runs.end(theirs, DONE, 18.0)
    assert not await store.runs.end(theirs, DONE, 19.0)
    ended = await store.runs.get("r")
    assert (ended.status, ended.output, ended.owner, ended.ended_at) == ("success", '{"x": 1}', None, 18.0)


async def test_events_of_a_lost_run_are_refused_and_those_of_others_kept(store):
    for thread in ("t1", "t2", "t3"):
        await store.threads.create(thread, {}, 0.0)
        await admit(store, f"run-{thread}", thread)
    lost, kept, others = await claim(store, "me"), await claim(store, "me"), await claim(store, "other")
    call = CallRow(kept.run_id, 1, "c1", "plan", 1, "stop", 10, 4, 1, 2, 0.5, "r", 11.0)
    stale = Batch(lost.run_id, "me", 7, [("values", "{}")])
    good = Batch(kept.run_id, "me", 1, [("metadata", "{}"), ("values", "1")], [call])
    foreign = Batch(others.run_id, "me", 1, [("values", "{}")])
    assert await store.events.append([stale, good, foreign], 11.0) == ({lost.run_id, others.run_id}, 0)
    assert await store.events.after(lost.run_id, 0) == []
    assert await store.events.after(others.run_id, 0) == []
    assert [(e.seq, e.event, e.data) for e in await store.events.after(kept.run_id, 1)] == [(2, "values", "1")]
    assert await store.events.calls_of(kept.run_id, 10) == [call]


async def test_a_full_run_drops_its_oldest_values_first_and_never_its_first_event(store):
    await store.threads.create("t", {}, 0.0)
    await admit(store, "r")
    run = await claim(store)
    names = ["metadata"] + ["values", "custom"] * 4
    assert await store.events.append([Batch("r", "me", 1, [(name, "{}") for name in names])], 1.0) == (set(), 0)
    more = [Batch("r", "me", 1, [("custom", "{}")] * 6)]
    assert await store.events.append(more, 1.0) == (set(), 6)
    kept = await store.events.after("r", 0)
    assert [e.event for e in kept] == ["metadata", "values"] + ["custom"] * 7
    assert [e.seq for e in kept] == [1, 8, 9, 10, 11, 12, 13, 14, 15], "the newest `values` is the state: it stays"
    assert await store.runs.end(run, DONE, 20.0)
    ended = await store.runs.get("r")
    assert (ended.last_seq, ended.events_dropped) == (16, 6)


@pytest.mark.parametrize("between", [20, 100])
async def test_a_full_run_keeps_its_newest_state_whatever_a_batch_holds(store, between):
    """Two `values` among many others: not even a batch that is far too long may drop the newer."""
    await store.threads.create("t", {}, 0.0)
    await admit(store, "run")
    run = await claim(store)
    events = [("metadata", "{}"), ("values", "old"), *[("custom", "c")] * between, ("values", "new")]
    await store.events.append([Batch("run", "me", run.attempt, events)], 11.0)
    kept = [(event.seq, event.event, event.data) for event in await store.events.after("run", 0)]
    newest = between + 3
    assert kept == [
        (1, "metadata", "{}"),
        *[(seq, "custom", "c") for seq in range(newest - 7, newest)],
        (newest, "values", "new"),
    ]


async def test_strategies_on_a_busy_thread(store):
    await store.threads.create("t", {}, 0.0)
    await admit(store, "running")
    await claim(store)
    with pytest.raises(ConflictError, match="busy with run 'running'"):
        await admit(store, "r1", multitask="reject")
    assert (await admit(store, "r2", multitask="enqueue")).stopping == ()
    admitted = await admit(store, "r3", multitask="interrupt")
    assert [(run.run_id, run.stop_request) for run in admitted.stopping] == [
        ("running", "interrupt"),
        ("r2", "interrupt"),
    ]
    assert await store.runs.stop_requests("me") == {"running": "interrupt"}


async def test_what_waits_is_bounded(store):
    for index in range(3):
        await store.threads.create(f"t{index}", {}, 0.0)
    await admit(store, "r0", "t0", max_pending=2)
    await admit(store, "r1", "t1", max_pending=2)
    with pytest.raises(UnavailableError, match="2 runs wait"):
        await admit(store, "r2", "t2", max_pending=2)
    assert await store.runs.find("r2") is None
    assert (await store.threads.get("t2")).status == "idle", "a refused run leaves no trace"


async def test_a_run_given_back_is_first_in_line_again(store):
    await store.threads.create("t", {}, 0.0)
    await admit(store, "a")
    await admit(store, "b")
    run = await claim(store)
    assert await store.runs.release(run, 12.0, counted=False)
    again = await claim(store, "next")
    assert (again.run_id, again.attempt, again.started_at) == ("a", 1, 10.0)


async def test_ended_runs_and_idle_threads_are_pruned_in_bounds(store):
    for index in range(3):
        await store.threads.create(f"t{index}", {}, 0.0)
        await admit(store, f"r{index}", f"t{index}")
        await store.runs.end(await claim(store), DONE, 20.0 + index)
    assert await store.threads.stale(before=100.0, limit=10) == [], "all hold runs"
    assert await store.runs.delete_ended(before=22.0, limit=1) == ["r0"]
    assert await store.runs.delete_ended(before=22.0, limit=10) == ["r1"]
    assert await store.runs.delete_ended(before=22.0, limit=10) == []
    assert sorted(await store.threads.stale(before=100.0, limit=10)) == ["t0", "t1"]
    assert await store.events.after("r0", 0) == []
    assert [e.event for e in await store.events.after("r2", 0)] == ["end"]


async def test_threads_are_found_by_metadata_and_status(store):
    await store.threads.create("a", {"user": "ann", "n": 1, "pro": True}, 1.0)
    await store.threads.create("b", {"user": "bob", "n": 2}, 2.0)
    await store.threads.update("b", {"n": 3}, 3.0)

    async def found(metadata, status=None):
        return [row.thread_id for row in await store.threads.search(metadata, status, 10, 0)]

    assert await found({}) == ["b", "a"]
    assert await found({"user": "ann", "n": 1, "pro": True}) == ["a"]
    assert await found({"n": 3, "user": "bob"}) == ["b"]
    assert await found({"user": "ann"}, "busy") == []
    with pytest.raises(InputError, match="only text"):
        await found({"user": ["ann"]})
    with pytest.raises(InputError, match="limit 0"):
        await store.threads.search({}, None, 0, 0)


async def test_names_that_do_not_exist_and_names_that_do(store):
    with pytest.raises(NotFoundError, match="thread 'x'"):
        await store.threads.get("x")
    with pytest.raises(NotFoundError, match="thread 'x'"):
        await admit(store, "r", "x")
    await store.threads.create("t", {}, 0.0)
    with pytest.raises(ConflictError, match="thread 't' exists"):
        await store.threads.create("t", {}, 0.0)
    await admit(store, "r")
    with pytest.raises(NotFoundError, match="run 'r' does not exist in thread 'other'"):
        await store.runs.get("r", "other")
    with pytest.raises(ConflictError, match="has not ended"):
        await store.runs.delete("r")
    with pytest.raises(ConflictError, match="in flight"):
        await store.runs.delete_of_thread("t")


async def test_tables_are_made_once_whoever_comes_first(url):
    stores = await asyncio.gather(*(Store.open(url) for _ in range(4)))
    await stores[0].threads.create("t", {}, 0.0)
    assert (await stores[3].threads.get("t")).thread_id == "t"
    for store in stores:
        await store.close()


async def test_tables_of_another_version_are_refused(url):
    store = await Store.open(url)
    await store.close()
    database = Database(url)
    async with database.write() as connection:
        await connection.execute(update(meta).values(value="99"))
    await database.close()
    with pytest.raises(ConfigError, match="version 99"):
        await Store.open(url)


@pytest.mark.parametrize(
    ("url", "said"),
    [("mysql://x/y", "mysql"), ("sqlite://", "in-memory"), ("nonsense", "cannot be read")],
)
async def test_urls_that_are_none(url, said):
    with pytest.raises(ConfigError, match=said):
        await Store.open(url)

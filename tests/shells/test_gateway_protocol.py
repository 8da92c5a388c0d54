"""The Agent Protocol's details that the stock client does not show: what reaches the run service, what is refused."""

from typing import Any

import pytest

from deployments.gateway import GatewayOptions
from deployments.http.assistants_table import assistant_id
from deployments.service import RunRequest
from tests.shells.gateway_kit import Kit, eventually


async def test_a_run_request_reaches_the_service_whole() -> None:
    kit = Kit()
    async with kit.client() as client:
        await client.post("/threads", json={"thread_id": "t1"})
        answer = await client.post(
            "/threads/t1/runs",
            json={
                "assistant_id": assistant_id("swe"),
                "input": {"steps": 1},
                "metadata": {"user": "me"},
                "config": {"tags": ["a"], "recursion_limit": 50, "configurable": {"style": "terse"}},
                "context": {"style": "long", "tone": "kind"},
                "stream_mode": ["values", "updates", "values", "messages-tuple"],
                "multitask_strategy": "enqueue",
                "interrupt_before": ["judge"],
                "interrupt_after": "*",
                "checkpoint_id": "c1",
                "durability": "sync",
                "stream_resumable": True,
            },
        )
    assert answer.status_code == 200
    assert answer.json()["assistant_id"] == assistant_id("swe")
    assert answer.headers["content-location"] == f"/threads/t1/runs/{answer.json()['run_id']}"
    assert kit.service.requests == [
        RunRequest(
            workflow="swe",
            input={"steps": 1},
            thread_id="t1",
            metadata={"user": "me"},
            config={
                "tags": ["a"],
                "recursion_limit": 50,
                "configurable": {"style": "terse", "tone": "kind", "checkpoint_id": "c1"},
            },
            stream_mode=("values", "updates", "messages-tuple"),
            multitask="enqueue",
            interrupt_before=("judge",),
            interrupt_after=("*",),
        )
    ]


async def test_a_command_resumes_and_keeps_its_shape() -> None:
    kit = Kit()
    async with kit.client() as client:
        for command in ({"resume": False}, {"resume": None}, {"goto": ["a", {"node": "b", "input": 1}], "update": {}}):
            answer = await client.post("/runs", json={"assistant_id": "hover", "command": command})
            assert answer.status_code == 200, answer.text
    assert [request.command for request in kit.service.requests] == [
        {"resume": False},
        {"resume": None},
        {"goto": ["a", {"node": "b", "input": 1}], "update": {}},
    ]


async def test_stateless_runs_keep_their_thread_unless_told_to_delete_it() -> None:
    kit = Kit()
    async with kit.client() as client:
        for asked in ({}, {"on_completion": "keep"}, {"on_completion": "delete"}):
            await client.post("/runs", json={"assistant_id": "hover", **asked})
    assert [request.keep_thread for request in kit.service.requests] == [True, True, False]


async def test_a_missing_thread_is_made_when_asked() -> None:
    kit = Kit()
    async with kit.client() as client:
        refused = await client.post("/threads/new/runs", json={"assistant_id": "hover"})
        made = await client.post("/threads/new/runs", json={"assistant_id": "hover", "if_not_exists": "create"})
    assert refused.status_code == 404
    assert refused.json() == {"detail": "thread 'new' does not exist; POST /threads makes one"}
    assert made.json()["thread_id"] == "new"


async def test_only_a_run_that_goes_on_says_where_to_come_back_to() -> None:
    kit = Kit()
    async with kit.client() as client:
        await client.post("/threads", json={"thread_id": "t1"})
        stateless = await client.post("/runs/stream", json={"assistant_id": "hover"})
        threaded = await client.post("/threads/t1/runs/stream", json={"assistant_id": "hover"})
        waited = await client.post("/threads/t1/runs/wait", json={"assistant_id": "hover"})
    assert "location" not in stateless.headers
    assert threaded.headers["location"] == f"{threaded.headers['content-location']}/stream"
    assert waited.headers["location"] == f"{waited.headers['content-location']}/join"


async def test_a_busy_thread_answers_409_and_the_other_strategies_pass_through() -> None:
    kit = Kit()
    asked = {"assistant_id": "hover", "input": {"hold": True}}
    async with kit.client() as client:
        await client.post("/threads", json={"thread_id": "t1"})
        first = (await client.post("/threads/t1/runs", json=asked)).json()
        refused = await client.post("/threads/t1/runs", json=asked)
        passed = [
            (await client.post("/threads/t1/runs", json={**asked, "multitask_strategy": strategy})).status_code
            for strategy in ("enqueue", "interrupt", "rollback")
        ]
        for run_id in kit.service.runs:
            kit.service.release(run_id)
    assert refused.status_code == 409
    assert refused.json() == {"detail": "thread 't1' is busy; wait, or choose another multitask_strategy"}
    assert passed == [200, 200, 200]
    assert [request.multitask for request in kit.service.requests] == ["reject", "enqueue", "interrupt", "rollback"]
    await eventually(kit.service.runs[first["run_id"]].ended)


async def test_a_batch_starts_all_or_none() -> None:
    kit = Kit(GatewayOptions(max_batch_runs=3))
    good, bad = {"assistant_id": "hover", "input": {"hold": True}}, {"assistant_id": "hover", "input": {"steps": "x"}}
    async with kit.client() as client:
        refused = await client.post("/runs/batch", json=[good, good, bad])
        for event in kit.service.cancelled.values():
            await eventually(event)
        unknown = await client.post("/runs/batch", json=[good, {"assistant_id": "nope"}])
        too_many = await client.post("/runs/batch", json=[good] * 4)
    assert (refused.status_code, unknown.status_code, too_many.status_code) == (422, 404, 422)
    assert too_many.json() == {"detail": "the batch holds 4 runs; at most 3 go in one, send several"}
    assert [run.row["status"] for run in kit.service.runs.values()] == ["interrupted", "interrupted"]


async def test_cancel_answers_at_once_or_when_the_run_has_stopped() -> None:
    kit = Kit()
    async with kit.client() as client:
        runs = [
            (await client.post("/runs", json={"assistant_id": "hover", "input": {"hold": True}})).json()
            for _ in range(2)
        ]
        paths = [f"/threads/{run['thread_id']}/runs/{run['run_id']}/cancel" for run in runs]
        at_once = await client.post(paths[0], params={"wait": 0, "action": "interrupt"})
        await eventually(kit.service.cancelled[runs[0]["run_id"]])
        waited = await client.post(paths[1], params={"wait": 1, "action": "rollback"})
        unknown = await client.post("/threads/t/runs/r/cancel")
    assert (at_once.status_code, at_once.content) == (202, b"")
    assert (waited.status_code, kit.service.cancelled[runs[1]["run_id"]].is_set()) == (204, True)
    assert unknown.json() == {"detail": "run 'r' does not exist"}


async def test_many_runs_are_cancelled_by_id_or_by_status() -> None:
    kit = Kit()
    async with kit.client() as client:
        made = [
            (await client.post("/runs", json={"assistant_id": "hover", "input": {"hold": True}})).json()["run_id"]
            for _ in range(3)
        ]
        by_id = await client.post("/runs/cancel", json={"run_ids": made[:1]})
        by_status = await client.post("/runs/cancel", json={"status": "running"})
        none_left = await client.post("/runs/cancel", json={"status": "all"})
        neither = await client.post("/runs/cancel", json={})
    assert [answer.status_code for answer in (by_id, by_status, none_left, neither)] == [204, 204, 404, 422]
    assert {run.row["status"] for run in kit.service.runs.values()} == {"interrupted"}


async def test_threads_are_found_by_ids_values_and_order() -> None:
    kit = Kit()
    async with kit.client() as client:
        for name in ("b", "a", "c"):
            await client.post("/threads", json={"thread_id": name, "metadata": {"kind": name}})
        await client.post("/threads/c/state", json={"values": {"verdict": "SUPPORTED"}})

        async def found(**asked: Any) -> list[Any]:
            answer = await client.post("/threads/search", json={"select": ["thread_id"], **asked})
            assert answer.status_code == 200, answer.text
            return [thread["thread_id"] for thread in answer.json()]

        assert await found() == ["b", "a", "c"]
        assert await found(limit=1, offset=1) == ["a"]
        assert await found(ids=["c", "nope", "a", "c"]) == ["c", "a"]
        assert await found(metadata={"kind": "a"}) == ["a"]
        assert await found(values={"verdict": "SUPPORTED"}) == ["c"]
        assert await found(sort_by="thread_id", sort_order="asc") == ["a", "b", "c"]
        assert await found(sort_by="thread_id", limit=2) == ["c", "b"]
        counted = await client.post("/threads/count", json={"values": {"verdict": "SUPPORTED"}})
        assert counted.json() == 1


async def test_states_and_histories_are_selected_and_filtered() -> None:
    kit = Kit()
    async with kit.client() as client:
        await client.post("/threads", json={"thread_id": "t1"})
        updated = await client.post("/threads/t1/state", json={"values": {"a": 1, "b": 2}, "as_node": "judge"})
        one_key = await client.get("/threads/t1/state", params={"select": ["values.a", "next"]})
        at = await client.get("/threads/t1/state/c1", params={"select": "values"})
        posted = await client.post(
            "/threads/t1/state/checkpoint", json={"checkpoint": {"checkpoint_id": "c1"}, "select": ["values"]}
        )
        unknown = await client.get("/threads/t1/state/c9")
        history = await client.post("/threads/t1/history", json={"metadata": {"step": 1}, "select": ["metadata"]})
        none = await client.post("/threads/t1/history", json={"metadata": {"step": 2}})
        before = await client.post("/threads/t1/history", json={"before": {"configurable": {"checkpoint_id": "c1"}}})
        got = await client.get("/threads/t1/history", params={"limit": 1})
    assert updated.json()["checkpoint"]["checkpoint_id"] == "c1"
    assert one_key.json() == {"values": {"a": 1}, "next": []}
    assert at.json() == posted.json() == {"values": {"a": 1, "b": 2}}
    assert unknown.status_code == 404
    assert (history.json(), none.json(), before.json(), len(got.json())) == ([{"metadata": {"step": 1}}], [], [], 1)


async def test_assistants_cannot_be_changed_and_have_one_version() -> None:
    kit = Kit()
    async with kit.client() as client:
        refused = [
            (await client.request(method, path, json={})).status_code
            for method, path in (
                ("POST", "/assistants"),
                ("PATCH", "/assistants/hover"),
                ("DELETE", "/assistants/hover"),
            )
        ]
        versions = await client.post("/assistants/hover/versions", json={})
        latest = await client.post("/assistants/hover/latest", json={"version": 1})
        missing = await client.post("/assistants/hover/latest", json={"version": 2})
        page = await client.post("/assistants/search", json={"limit": 1, "sort_by": "name", "sort_order": "desc"})
    assert refused == [405, 405, 405]
    assert [row["version"] for row in versions.json()] == [latest.json()["version"]] == [1]
    assert missing.status_code == 404
    assert [row["graph_id"] for row in page.json()] == ["swe"]
    assert page.headers["x-pagination-next"] == "1"


async def test_our_own_routes_list_runs_across_threads_and_show_their_calls() -> None:
    kit = Kit()
    async with kit.client() as client:
        run = (await client.post("/runs", json={"assistant_id": "hover"})).json()
        await eventually(kit.service.runs[run["run_id"]].ended)
        listed = await client.get("/v1/runs", params={"status": "success"})
        one = await client.get(f"/v1/runs/{run['run_id']}")
        calls = await client.get(f"/v1/runs/{run['run_id']}/calls")
        unknown = await client.get("/v1/runs/nope/calls")
    assert listed.json() == [one.json()]
    assert one.json()["assistant_id"] == assistant_id("hover")
    assert calls.json() == [{"agent": "judge", "step": 1, "prompt_tokens": 7}]
    assert unknown.status_code == 404


@pytest.mark.parametrize(
    ("path", "body", "status", "detail"),
    [
        ("/runs", {"assistant_id": "hover", "webhook": "http://x"}, 422, "webhook is 'http://x'; the server calls no"),
        ("/runs", {"assistant_id": "hover", "after_seconds": 5}, 422, "after_seconds is 5; runs start at once"),
        ("/runs", {"assistant_id": "hover", "input": {}, "command": {}}, 422, "input and command are both given"),
        ("/runs", {"assistant_id": "hover", "checkpoint": {"checkpoint_ns": "a"}}, 422, "checkpoint_ns is 'a'"),
        (
            "/runs",
            {"assistant_id": "hover", "stream_mode": "loud"},
            422,
            "the body: stream_mode is 'loud'; input should be",
        ),
        ("/runs", {"assistant_id": "hover", "stream_mode": ["values", 1]}, 422, "the body: stream_mode.1 is 1; input"),
        (
            "/runs",
            {"assistant_id": "hover", "config": {"recursion_limit": 0}},
            422,
            "the body: config.recursion_limit is 0",
        ),
        ("/runs", {"assistant_id": "hover", "input": []}, 422, "the body: input is []; input should be a valid dict"),
        ("/runs", [], 422, "the body: it is []; input should be a valid dict"),
        ("/threads", {"supersteps": [{}]}, 422, "supersteps are given"),
        ("/threads", {"ttl": 60}, 422, "ttl is 60; threads are kept"),
        ("/threads", {"thread_id": "a b"}, 422, "the body: thread_id is 'a b'"),
        ("/threads/t1/state", {"values": [{}]}, 422, "values is a list"),
        ("/threads/t1/state", {"checkpoint_id": "c1"}, 422, "a checkpoint is given"),
        ("/threads/search", {"limit": 0}, 422, "the body: limit is 0"),
        ("/threads/search", {"limit": 10_000}, 422, "limit is 10000; a page holds at most 1000"),
        ("/threads/search", {"extract": {"a": "b"}}, 422, "extract is given"),
        ("/threads/t1/history", {"before": {"x": 1}}, 422, "before is {'x': 1}; send the id of the checkpoint"),
        ("/crons/search", {}, 404, "POST '/crons/search' is not offered here"),
    ],
)
async def test_what_is_not_done_is_refused_with_a_reason(path: str, body: Any, status: int, detail: str) -> None:
    kit = Kit()
    async with kit.client() as client:
        answer = await client.post(path, json=body)
    assert answer.status_code == status, answer.text
    assert answer.json()["detail"].startswith(detail), answer.json()
    assert kit.service.requests == []

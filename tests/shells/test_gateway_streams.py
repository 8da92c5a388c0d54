"""Streams and waits: what a client that leaves, comes back or is slow may rely on. Over a real server."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import anyio
import httpx

from deployments.gateway import GatewayOptions
from deployments.http.context import Tasks
from deployments.http.streams import Pump
from tests.shells.gateway_kit import Kit, eventually

HELD = {"steps": 1, "hold": True}


async def _first_event(response: httpx.Response) -> list[str]:
    """The lines of the first event; the connection stays open."""
    lines: list[str] = []
    async for line in response.aiter_lines():
        if not line:
            return lines
        lines.append(line)
    raise AssertionError(f"the stream ended: {lines}")


async def _leave_early(url: str, path: str, body: dict[str, Any]) -> str:
    """Opens a stream, reads one event, leaves. Returns the run's id."""
    async with httpx.AsyncClient(base_url=url) as client, client.stream("POST", path, json=body) as response:
        assert response.status_code == 200, await response.aread()
        lines = await _first_event(response)
    assert lines[0] == "id: 1" and lines[1] == "event: metadata"
    return str(json.loads(lines[2].removeprefix("data: "))["run_id"])


async def test_leaving_a_stateless_stream_stops_its_run() -> None:
    kit = Kit()
    async with kit.served() as url:
        run_id = await _leave_early(url, "/runs/stream", {"assistant_id": "hover", "input": HELD})
        await eventually(kit.service.cancelled[run_id])
    assert kit.service.runs[run_id].row["status"] == "interrupted"
    assert kit.service.readers == 0


async def test_leaving_a_threads_stream_leaves_its_run_running() -> None:
    kit = Kit()
    async with kit.served() as url, httpx.AsyncClient(base_url=url) as client:
        thread_id = (await client.post("/threads", json={})).json()["thread_id"]
        path = f"/threads/{thread_id}/runs/stream"
        run_id = await _leave_early(url, path, {"assistant_id": "hover", "input": HELD})
        # The server has seen the client go: a later request is answered, the reader is gone, the run is not.
        while kit.service.readers:
            await client.get("/ok")
        assert kit.service.runs[run_id].row["status"] == "running"
        kit.service.release(run_id)
        joined = await client.get(f"/threads/{thread_id}/runs/{run_id}/join")
        assert joined.json() == {"step": 1}
        assert kit.service.runs[run_id].row["status"] == "success"


async def test_on_disconnect_overrides_both_defaults() -> None:
    kit = Kit()
    async with kit.served() as url, httpx.AsyncClient(base_url=url) as client:
        thread_id = (await client.post("/threads", json={})).json()["thread_id"]
        asked = {"assistant_id": "hover", "input": HELD}
        stopped = await _leave_early(url, f"/threads/{thread_id}/runs/stream", {**asked, "on_disconnect": "cancel"})
        await eventually(kit.service.cancelled[stopped])
        kept = await _leave_early(url, "/runs/stream", {**asked, "on_disconnect": "continue"})
        while kit.service.readers:
            await client.get("/ok")
        assert kit.service.runs[kept].row["status"] == "running"
        kit.service.release(kept)
        await eventually(kit.service.runs[kept].ended)


async def test_a_joined_stream_cancels_on_disconnect_when_asked() -> None:
    kit = Kit()
    async with kit.served() as url, httpx.AsyncClient(base_url=url) as client:
        run = (await client.post("/runs", json={"assistant_id": "hover", "input": HELD})).json()
        path = f"/threads/{run['thread_id']}/runs/{run['run_id']}/stream"
        async with client.stream("GET", path, params={"cancel_on_disconnect": "true"}) as response:
            await _first_event(response)
        await eventually(kit.service.cancelled[run["run_id"]])


async def test_leaving_a_stateless_wait_stops_its_run() -> None:
    kit = Kit(GatewayOptions(heartbeat_s=0.01))
    async with kit.served() as url:
        async with httpx.AsyncClient(base_url=url) as client:
            asked = {"assistant_id": "hover", "input": HELD}
            async with client.stream("POST", "/runs/wait", json=asked) as response:
                run_id = response.headers["content-location"].rpartition("/")[2]
                assert "location" not in response.headers  # there will be nothing to come back to
                assert await anext(response.aiter_raw()) == b"\n"
        await eventually(kit.service.cancelled[run_id])


async def test_a_wait_beats_until_the_run_ends() -> None:
    kit = Kit(GatewayOptions(heartbeat_s=0.01))
    async with kit.served() as url, httpx.AsyncClient(base_url=url) as client:
        run = (await client.post("/runs", json={"assistant_id": "hover", "input": HELD})).json()
        path = f"/threads/{run['thread_id']}/runs/{run['run_id']}/join"
        async with client.stream("GET", path) as response:
            chunks = response.aiter_raw()
            assert [await anext(chunks) for _ in range(3)] == [b"\n"] * 3
            kit.service.release(run["run_id"])
            assert json.loads(b"".join([chunk async for chunk in chunks])) == {"step": 1}


async def test_an_event_stream_beats_while_the_run_is_silent() -> None:
    kit = Kit(GatewayOptions(heartbeat_s=0.01))
    async with kit.served() as url, httpx.AsyncClient(base_url=url) as client:
        run = (await client.post("/runs", json={"assistant_id": "hover", "input": HELD})).json()
        path = f"/threads/{run['thread_id']}/runs/{run['run_id']}/stream"
        async with client.stream("GET", path, headers={"last-event-id": "2"}) as response:
            lines = response.aiter_lines()
            assert (await anext(lines)).startswith(": ping")
            kit.service.release(run["run_id"])
            rest = [line async for line in lines if line and not line.startswith(":")]
    assert rest == ["id: 3", "event: end", f'data: {{"run_id": "{run["run_id"]}", "status": "success"}}']


async def test_two_readers_of_a_run_see_the_same_events() -> None:
    kit = Kit()
    async with kit.served() as url, httpx.AsyncClient(base_url=url) as client:
        run = (await client.post("/runs", json={"assistant_id": "hover", "input": {**HELD, "steps": 3}})).json()
        path = f"/threads/{run['thread_id']}/runs/{run['run_id']}/stream"
        readers = [asyncio.create_task(client.get(path)) for _ in range(2)]
        while kit.service.readers < 2:
            await client.get("/ok")
        kit.service.release(run["run_id"])
        texts = [(await reader).text for reader in readers]
    assert texts[0] == texts[1]
    assert [line for line in texts[0].splitlines() if line.startswith("id:")] == [f"id: {n}" for n in range(1, 6)]


async def test_a_failed_run_ends_its_stream_and_its_wait_with_the_reason() -> None:
    kit = Kit()
    asked = {"assistant_id": "hover", "input": {"steps": 0, "fail": "no such filing"}}
    async with kit.client() as client:
        waited = await client.post("/runs/wait", json=asked)
        streamed = await client.post("/runs/stream", json=asked)
    said = {"error": "ValueError", "message": "no such filing"}
    assert waited.status_code == 200 and waited.json() == {"__error__": said}
    assert streamed.text.splitlines()[-3:-1] == ["event: error", f"data: {json.dumps(said)}"]


async def test_a_stream_that_breaks_says_so_in_the_stream() -> None:
    kit = Kit()

    async def broken(thread_id: str | None, run_id: str, after: int) -> Any:
        raise ConnectionError("the runner is gone")
        yield

    kit.service.stream_run = broken  # type: ignore[method-assign]
    async with kit.client() as client:
        answer = await client.post("/runs/stream", json={"assistant_id": "hover", "input": {}})
    said = {"error": "ConnectionError", "message": "the runner is gone"}
    assert answer.text.splitlines()[:2] == ["event: error", f"data: {json.dumps(said)}"]


async def test_last_event_id_is_a_number_or_refused() -> None:
    kit = Kit()
    async with kit.client() as client:
        run = (await client.post("/runs", json={"assistant_id": "hover", "input": {"steps": 1}})).json()
        await eventually(kit.service.runs[run["run_id"]].ended)
        path = f"/threads/{run['thread_id']}/runs/{run['run_id']}/stream"
        ids = {}
        for given in ("", "-1", "1", "3", "99"):
            answer = await client.get(path, headers={"last-event-id": given})
            ids[given] = [line[4:] for line in answer.text.splitlines() if line.startswith("id: ")]
        refused = await client.get(path, headers={"last-event-id": "three"})
    assert ids == {"": ["1", "2", "3"], "-1": ["1", "2", "3"], "1": ["2", "3"], "3": [], "99": []}
    assert refused.status_code == 422
    assert refused.json() == {"detail": "Last-Event-ID is 'three'; it is the number of the last event received"}


async def test_a_pump_that_is_closed_before_it_began_still_ends_its_work() -> None:
    tasks, ended = Tasks(), asyncio.Event()

    async def source() -> AsyncIterator[int]:
        raise AssertionError("nobody reads it")
        yield 1

    async def left() -> None:
        ended.set()

    Pump(source(), tasks, "test", left).close()
    await eventually(ended)


async def test_a_pump_gives_its_source_the_time_to_end() -> None:
    """The web framework cancels over and over; the source sees one cancellation and may await afterwards."""
    tasks, order, done = Tasks(), [], asyncio.Event()

    async def source() -> AsyncIterator[int]:
        try:
            yield 1
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            order.append("closed")

    async def left() -> None:
        order.append("left")
        done.set()

    pump = Pump(source(), tasks, "test", left)
    with anyio.CancelScope() as scope:
        async for item in pump:
            order.append(item)
            scope.cancel()
    pump.close()
    pump.close()
    await eventually(done)
    assert order == [1, "closed", "left"]

"""A user's script with only `langgraph_sdk`: every part of the Agent Protocol that the gateway offers.

`python -m tests.e2e.sdk_script URL WORKFLOW INPUT_JSON` runs it against any server; it prints what it saw.
"""

import asyncio
import json
import sys
from typing import Any

from langgraph_sdk import get_client
from langgraph_sdk.errors import ConflictError, NotFoundError

Json = dict[str, Any]


async def exercise(url: str, workflow: str, quick: Json, slow: Json, api_key: str = "") -> Json:
    """Uses `workflow` as a user would. `quick` is an input that ends; `slow` runs long enough to be interfered with.

    Returns what was seen, for a test to compare. Raises AssertionError where the protocol says what must be.
    """
    seen: Json = {}
    async with get_client(url=url, api_key=api_key) as client:
        seen["assistants"] = await _assistants(client, workflow)
        thread = await client.threads.create(metadata={"made_by": "sdk_script"})
        thread_id = thread["thread_id"]
        seen["background"] = await _background(client, thread_id, workflow, quick)
        seen["stream"] = await _stream(client, thread_id, workflow, quick)
        seen["threads"] = await _threads(client, thread_id)
        seen["busy"] = await _busy(client, thread_id, workflow, quick, slow)
        seen["stateless"] = await _stateless(client, workflow, quick)
        seen["unknown"] = await _unknown(client, thread_id, quick)
        await client.threads.delete(thread_id)
        try:
            await client.threads.get(thread_id)
            raise AssertionError("the deleted thread is still there")
        except NotFoundError:
            pass
    return seen


async def _assistants(client: Any, workflow: str) -> Json:
    by_graph = await client.assistants.search(graph_id=workflow)
    assert len(by_graph) == 1, by_graph
    assistant_id = by_graph[0]["assistant_id"]
    assert (await client.assistants.get(workflow))["assistant_id"] == assistant_id
    assert (await client.assistants.get(assistant_id))["graph_id"] == workflow
    page = await client.assistants.search(limit=1, response_format="object")
    assert len(page["assistants"]) == 1
    graph = await client.assistants.get_graph(assistant_id)
    schemas = await client.assistants.get_schemas(assistant_id)
    assert schemas["graph_id"] == workflow
    return {
        "count": await client.assistants.count(),
        "graph_nodes": [node["id"] for node in graph["nodes"]],
        "schemas": sorted(schemas),
    }


async def _background(client: Any, thread_id: str, workflow: str, quick: Json) -> Json:
    created: list[Any] = []
    run = await client.runs.create(thread_id, workflow, input=quick, on_run_created=created.append)
    assert created == [{"run_id": run["run_id"], "thread_id": thread_id}], created
    values = await client.runs.join(thread_id, run["run_id"])
    again = await client.runs.get(thread_id, run["run_id"])
    assert run["run_id"] in [one["run_id"] for one in await client.runs.list(thread_id)]
    only_status = await client.runs.list(thread_id, status="success", select=["status"])
    return {"values": values, "status": again["status"], "listed": only_status}


async def _stream(client: Any, thread_id: str, workflow: str, quick: Json) -> Json:
    created: list[Any] = []
    stream = client.runs.stream(
        thread_id, workflow, input=quick, stream_mode=["values", "updates"], on_run_created=created.append
    )
    parts = [part async for part in stream]
    run_id = created[0]["run_id"]
    ids = [int(part.id) for part in parts]
    assert ids == list(range(1, len(parts) + 1)), ids
    assert parts[0].event == "metadata" and parts[0].data["run_id"] == run_id, parts[0]
    assert parts[-1].event == "end", parts[-1]
    # A client that was cut off after the second event gets the rest, no more and no less.
    rest = [part async for part in client.runs.join_stream(thread_id, run_id, last_event_id=parts[1].id)]
    assert rest == parts[2:], (rest, parts)
    values = [part async for part in client.runs.join_stream(thread_id, run_id, stream_mode="values")]
    assert {part.event for part in values} == {"metadata", "values", "end"}, values
    typed = [
        part async for part in client.runs.stream(thread_id, workflow, input=quick, stream_mode="values", version="v2")
    ]
    assert {part["type"] for part in typed} == {"metadata", "values"}, typed
    return {"events": sorted({part.event for part in parts}), "last_values": typed[-1]["data"]}


async def _threads(client: Any, thread_id: str) -> Json:
    patched = await client.threads.update(thread_id, metadata={"seen": True})
    assert patched["metadata"]["made_by"] == "sdk_script" and patched["metadata"]["seen"] is True, patched
    found = await client.threads.search(metadata={"seen": True}, ids=[thread_id])
    assert [thread["thread_id"] for thread in found] == [thread_id]
    counted = await client.threads.count(metadata={"seen": True})
    assert counted >= 1
    state = await client.threads.get_state(thread_id)
    checkpoint_id = state["checkpoint"]["checkpoint_id"]
    same = await client.threads.get_state(thread_id, checkpoint_id=checkpoint_id)
    assert same["values"] == state["values"]
    history = await client.threads.get_history(thread_id, limit=100)
    assert history[0]["checkpoint"]["checkpoint_id"] == checkpoint_id, history[0]
    try:
        await client.threads.create(thread_id=thread_id, if_exists="raise")
        raise AssertionError("a second thread of the same id was made")
    except ConflictError:
        pass
    assert (await client.threads.create(thread_id=thread_id, if_exists="do_nothing"))["thread_id"] == thread_id
    return {"next": list(state["next"]), "history": len(history)}


async def _busy(client: Any, thread_id: str, workflow: str, quick: Json, slow: Json) -> Json:
    first = await client.runs.create(thread_id, workflow, input=slow)
    try:
        await client.runs.create(thread_id, workflow, input=quick)
        raise AssertionError("a busy thread took a second run")
    except ConflictError as error:
        refused = str(error)
    queued = await client.runs.create(thread_id, workflow, input=quick, multitask_strategy="enqueue")
    await client.runs.cancel(thread_id, first["run_id"], wait=True)
    await client.runs.join(thread_id, queued["run_id"])
    return {
        "refused": refused,
        "cancelled": (await client.runs.get(thread_id, first["run_id"]))["status"],
        "queued": (await client.runs.get(thread_id, queued["run_id"]))["status"],
    }


async def _stateless(client: Any, workflow: str, quick: Json) -> Json:
    values = await client.runs.wait(None, workflow, input=quick)
    events = [part.event async for part in client.runs.stream(None, workflow, input=quick, stream_mode="values")]
    batch = await client.runs.create_batch([{"assistant_id": workflow, "input": quick}] * 2)
    for run in batch:
        await client.runs.join(run["thread_id"], run["run_id"])
    statuses = [(await client.runs.get(run["thread_id"], run["run_id"]))["status"] for run in batch]
    for run in batch:
        await client.runs.delete(run["thread_id"], run["run_id"])
    return {"values": values, "first": events[0], "last": events[-1], "batch": statuses}


async def _unknown(client: Any, thread_id: str, quick: Json) -> Json:
    said = {}
    for what, asking in {
        "assistant": client.runs.create(thread_id, "no-such-workflow", input=quick),
        "thread": client.threads.get("no-such-thread"),
        "run": client.runs.get(thread_id, "no-such-run"),
    }.items():
        try:
            await asking
            raise AssertionError(f"an unknown {what} was found")
        except NotFoundError as error:
            said[what] = str(error)
    return said


if __name__ == "__main__":
    address, name, given = sys.argv[1:4]
    what = json.loads(given)
    print(json.dumps(asyncio.run(exercise(address, name, what, what)), indent=1))

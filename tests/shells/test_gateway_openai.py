"""OpenAI's protocol: who calls, what the controller hears of it, and what a client that leaves stops."""

import asyncio
import json
from typing import Any

import httpx
import pytest

from deployments.gateway import GatewayOptions
from pbkv_ray.core.calls import Caller
from pbkv_ray.core.events import AgentEntered, AgentLeft, CallFinished, CallStarted, RunEnded, RunStarted
from pbkv_ray.errors import EngineError, InputError
from tests.shells.gateway_kit import Kit, eventually

ASKED = {"model": "org/tiny", "messages": [{"role": "user", "content": "Say hello."}]}
RUN = {"x-pbkv-run-id": "r1", "x-pbkv-agent": "coder", "x-pbkv-workflow": "fixing"}
AT = 1_000.0


async def _ask(client: httpx.AsyncClient, headers: dict[str, str], **body: Any) -> httpx.Response:
    return await client.post("/v1/chat/completions", json={**ASKED, **body}, headers=headers)


async def test_a_foreign_run_is_told_from_its_first_call_to_its_final_one() -> None:
    kit = Kit()
    async with kit.client() as client:
        first = await _ask(client, RUN)
        last = await _ask(client, {**RUN, "x-pbkv-agent": "tester", "x-pbkv-run-final": "true"}, stream=True)
    ids = [first.headers["x-request-id"], last.headers["x-request-id"]]
    assert ids == [body["rid"] for body, _, _ in kit.chat.asked]
    finished = {"prompt_tokens": 9, "output_tokens": 2, "device_cached_tokens": 4}
    assert kit.events == [
        RunStarted("ext:r1", "ext:fixing", AT),
        AgentEntered("ext:r1", "coder", 0, AT),
        CallStarted("ext:r1", "coder", 0, ids[0], AT),
        CallFinished("ext:r1", "coder", 0, ids[0], AT, "stop", **finished),
        AgentLeft("ext:r1", "coder", 0, AT),
        AgentEntered("ext:r1", "tester", 1, AT),
        CallStarted("ext:r1", "tester", 1, ids[1], AT),
        CallFinished("ext:r1", "tester", 1, ids[1], AT, "stop", **finished),
        AgentLeft("ext:r1", "tester", 1, AT),
        RunEnded("ext:r1", "completed", AT),
    ]
    assert [caller for _, caller, _ in kit.chat.asked] == [
        Caller("ext:r1", "ext:fixing", "coder", 0),
        Caller("ext:r1", "ext:fixing", "tester", 1),
    ]


async def test_a_call_that_names_no_run_is_served_and_told_to_nobody() -> None:
    kit = Kit()
    async with kit.client() as client:
        answer = await _ask(client, {"x-pbkv-agent": "coder"})
    assert answer.json()["choices"][0]["message"]["content"] == "Hello there"
    assert (kit.events, kit.chat.asked[0][1]) == ([], None)


async def test_an_agent_without_a_name_is_the_default_one() -> None:
    kit = Kit()
    async with kit.client() as client:
        await _ask(client, {"x-claude-code-session-id": "s1", "x-claude-code-parent-agent-id": "s0"})
    assert kit.chat.asked[0][1] == Caller("ext:s1", "ext:default", "default", 0, "ext:s0")
    assert kit.events[0] == RunStarted("ext:s1", "ext:default", AT, parent_run_id="ext:s0")


async def test_tenants_with_the_same_run_id_have_two_runs() -> None:
    keys = ("alice-0123456789abcdef", "bob-0123456789abcdef")
    kit = Kit(GatewayOptions(api_keys=keys, salt_secret="a secret of the server"))
    async with kit.client() as client:
        for key in keys:
            await _ask(client, {**RUN, "authorization": f"Bearer {key}"})
    runs = [caller.run_id for _, caller, _ in kit.chat.asked]
    salts = [salt for _, _, salt in kit.chat.asked]
    assert len(set(runs)) == len(set(salts)) == 2
    assert all(run.startswith("ext:") and run.endswith(":r1") for run in runs)


async def test_a_bad_id_is_a_4xx_in_openais_shape() -> None:
    kit = Kit()
    async with kit.client() as client:
        answer = await _ask(client, {"x-pbkv-run-id": "a" * 500})
    assert answer.status_code == 422
    assert answer.json()["error"]["message"].endswith("an id is 1 to 160 printable characters")
    assert (kit.events, kit.chat.asked) == ([], [])


async def test_the_final_call_may_overtake_its_siblings() -> None:
    kit = Kit()
    kit.chat.hold.clear()
    async with kit.client() as client:
        sibling = asyncio.create_task(_ask(client, RUN))
        await eventually(kit.chat.started)
        kit.chat.hold.set()
        kit.chat.hold = asyncio.Event()
        kit.chat.hold.set()
        final = asyncio.create_task(_ask(client, {**RUN, "x-pbkv-run-final": "1"}))
        await asyncio.gather(sibling, final)
    assert [type(event) for event in kit.events].count(RunEnded) == 1
    assert isinstance(kit.events[-1], RunEnded)


async def test_a_client_that_leaves_a_stream_stops_the_call() -> None:
    kit = Kit()
    kit.chat.hold.clear()
    async with kit.served() as url, httpx.AsyncClient(base_url=url) as client:
        body = {**ASKED, "stream": True}
        async with client.stream("POST", "/v1/chat/completions", json=body, headers=RUN) as response:
            assert "Hello" in await anext(response.aiter_text())
        await eventually(kit.chat.left)
        await _until(lambda: len(kit.events) == 5, client)
    assert [event.reason for event in kit.events if isinstance(event, CallFinished)] == ["abort"]
    assert isinstance(kit.events[-1], AgentLeft)


async def test_a_client_that_leaves_a_whole_answer_stops_the_call() -> None:
    kit = Kit()
    kit.chat.hold.clear()
    async with kit.served() as url, httpx.AsyncClient(base_url=url) as client:
        asking = asyncio.create_task(_ask(client, {**RUN, "x-pbkv-run-final": "true"}))
        await eventually(kit.chat.started)
        asking.cancel()
        await eventually(kit.chat.left)
        await _until(lambda: len(kit.events) == 6, client)
    assert [event.reason for event in kit.events if isinstance(event, CallFinished)] == ["abort"]
    assert kit.events[-1] == RunEnded("ext:r1", "cancelled", AT)


async def _until(holds: Any, client: httpx.AsyncClient) -> None:
    """Lets the server work, request by request, until `holds`."""
    for _ in range(2_000):
        if holds():
            return
        await client.get("/ok")
    raise AssertionError("it never came true")


@pytest.mark.parametrize("stream", [False, True])
async def test_what_the_engine_refuses_is_a_4xx_and_what_it_breaks_a_503(stream: bool) -> None:
    kit = Kit()
    async with kit.client() as client:
        kit.chat.error = InputError("the prompt has 9000 tokens; the engine takes fewer than 8192")
        refused = await _ask(client, RUN, stream=stream)
        kit.chat.error = EngineError("the scheduler is gone")
        broken = await _ask(client, RUN, stream=stream)
    assert (refused.status_code, broken.status_code) == (422, 503)
    assert refused.json()["error"] == {
        "message": "the prompt has 9000 tokens; the engine takes fewer than 8192",
        "type": "invalid_request_error",
        "param": None,
        "code": None,
    }
    assert broken.json()["error"]["type"] == "server_error"
    assert [event.reason for event in kit.events if isinstance(event, CallFinished)] == ["error", "error"]


async def test_a_stream_that_is_refused_before_its_first_chunk_has_a_status() -> None:
    kit = Kit()

    async def refuses(*_: Any) -> Any:
        async def chunks() -> Any:
            raise InputError("temperature is -1; it must not be negative")
            yield b""

        return chunks()

    kit.chat.openai_chat = refuses  # type: ignore[method-assign]
    async with kit.client() as client:
        answer = await _ask(client, RUN, stream=True)
    assert (answer.status_code, answer.json()["error"]["type"]) == (422, "invalid_request_error")


async def test_a_stream_that_breaks_in_the_middle_says_so() -> None:
    kit = Kit()

    async def breaks(*_: Any) -> Any:
        async def chunks() -> Any:
            yield b'data: {"choices": [{"delta": {"content": "Hel"}, "finish_reason": null}]}\n\n'
            raise EngineError("the scheduler is gone")

        return chunks()

    kit.chat.openai_chat = breaks  # type: ignore[method-assign]
    async with kit.client() as client:
        answer = await _ask(client, RUN, stream=True)
    assert answer.status_code == 200
    last = json.loads(answer.text.strip().rpartition("data: ")[2])
    assert last["error"]["message"] == "the scheduler is gone"
    assert [event.reason for event in kit.events if isinstance(event, CallFinished)] == ["error"]


async def test_usage_is_asked_for_always_and_shown_when_wanted() -> None:
    kit = Kit()
    async with kit.client() as client:
        plain = await _ask(client, {}, stream=True)
        asked = await _ask(
            client, {}, stream=True, stream_options={"include_usage": True, "continuous_usage_stats": False}
        )
    assert [body["stream_options"] for body, _, _ in kit.chat.asked] == [
        {"include_usage": True},
        {"include_usage": True, "continuous_usage_stats": False},
    ]
    assert "usage" not in plain.text and '"prompt_tokens": 9' in asked.text
    assert plain.text.endswith("data: [DONE]\n\n") and asked.text.endswith("data: [DONE]\n\n")


async def test_a_chunk_boundary_may_fall_anywhere() -> None:
    """The events of a stream are the same however the engine's bytes are cut."""
    kit = Kit()
    whole = b"".join([chunk async for chunk in kit.chat._stream({"rid": "x"})])
    seen = set()
    for size in (1, 7, 64, len(whole)):

        async def cut(*_: Any, size: int = size) -> Any:
            async def chunks() -> Any:
                for start in range(0, len(whole), size):
                    yield whole[start : start + size]

            return chunks()

        kit.chat.openai_chat = cut  # type: ignore[method-assign]
        async with kit.client() as client:
            seen.add((await _ask(client, RUN, stream=True)).text)
    assert len(seen) == 1
    assert {event.prompt_tokens for event in kit.events if isinstance(event, CallFinished)} == {9}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 10**9),
        ("n", 0),
        ("temperature", -1),
        ("top_k", 2**31),
        ("seed", 2**63),
        ("max_tokens", 0),
        ("logit_bias", {"5": 1e300}),
        ("logit_bias", {"x": 1}),
        ("stop", ["a"] * 17),
        ("stream", "yes"),
        ("messages", [{"content": "hi"}]),
    ],
)
async def test_numbers_that_would_hurt_the_engine_do_not_reach_it(field: str, value: Any) -> None:
    kit = Kit()
    async with kit.client() as client:
        answer = await _ask(client, RUN, **{field: value})
    assert answer.status_code == 422
    assert field in answer.json()["error"]["message"]
    assert (kit.chat.asked, kit.events) == ([], [])


async def test_a_logprob_of_minus_infinity_is_answered_as_null() -> None:
    kit = Kit()

    async def answers(*_: Any) -> Any:
        return {"choices": [{"logprobs": {"content": [{"logprob": float("-inf")}]}, "finish_reason": "stop"}]}

    kit.chat.openai_chat = answers  # type: ignore[method-assign]
    async with kit.client() as client:
        answer = await _ask(client, {})
    assert answer.json()["choices"][0]["logprobs"] == {"content": [{"logprob": None}]}

"""The engine server on a real SGLang engine with the tiny random-weight model."""

import asyncio
import json
import re
from dataclasses import replace

import pytest

from pbkv_ray.core.calls import Reply
from pbkv_ray.engine.server import EngineServer
from pbkv_ray.errors import EngineError, InputError, NotFoundError
from tests.shells.engine_kit import LONG, answer, becomes, call

pytestmark = pytest.mark.engine


async def held(engine: EngineServer) -> tuple[int, int]:
    """Calls that run and wait in the scheduler. It says so when it starts a prompt, now and then, and when idle."""
    load = await engine.load()
    return load["running"], load["waiting"]


async def test_a_call_streams_its_text_and_ends_with_the_whole_reply(engine: EngineServer) -> None:
    reply = await answer(engine, call("Name three colours.", max_tokens=12))
    assert reply.reason == "length"
    assert reply.output_tokens == 12
    assert reply.replica == "tests"
    assert 0 < reply.first_token_seconds <= reply.seconds


async def test_the_second_time_a_prompt_comes_from_the_device_tier(engine: EngineServer) -> None:
    first = await answer(engine, call(f"Once. {LONG}", max_tokens=8))
    again = await answer(engine, call(f"Once. {LONG}", max_tokens=8))
    assert again.text == first.text
    assert again.device_cached_tokens == again.prompt_tokens - 1
    assert again.host_cached_tokens == 0


async def test_tenants_do_not_share_the_cache(engine: EngineServer) -> None:
    text = f"Tenant. {LONG}"
    await answer(engine, call(text, max_tokens=2, cache_salt="one"))
    other = await answer(engine, call(text, max_tokens=2, cache_salt="two"))
    same = await answer(engine, call(text, max_tokens=2, cache_salt="one"))
    assert (other.device_cached_tokens, same.device_cached_tokens) == (0, same.prompt_tokens - 1)


async def test_a_schema_and_a_regex_bind_even_random_weights(engine: EngineServer) -> None:
    schema = {
        "type": "object",
        "properties": {"verdict": {"enum": ["SUPPORTED", "NOT_SUPPORTED"]}, "why": {"type": "string", "maxLength": 20}},
        "required": ["verdict", "why"],
    }
    written = await answer(engine, call("Judge.", max_tokens=120, json_schema=json.dumps(schema)))
    assert written.reason == "stop"
    assert json.loads(written.text)["verdict"] in ("SUPPORTED", "NOT_SUPPORTED")
    assert "\n" not in written.text
    chosen = await answer(engine, call("Judge.", max_tokens=20, regex="(PASS|FAIL)"))
    assert re.fullmatch("PASS|FAIL", chosen.text)


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        (call("word " * 9_000), r"the prompt has \d+ tokens; the engine takes fewer than \d+"),
        (call("Judge.", json_schema='{"type":'), "SGLang ended the request"),
        (call("Judge.", json_schema="{}", regex="a"), "has a json_schema and a regex"),
        (call("Judge.", max_tokens=-1), "SGLang refused the request"),
    ],
    ids=["too long", "broken schema", "two constraints", "negative"],
)
async def test_a_call_that_cannot_be_served_is_refused_with_a_reason(
    engine: EngineServer, asked: object, says: str
) -> None:
    with pytest.raises(InputError, match=says):
        await answer(engine, asked)  # type: ignore[arg-type]
    await becomes((0, 0), lambda: held(engine))


async def test_leaving_the_stream_stops_the_call_in_the_scheduler(engine: EngineServer) -> None:
    stream = engine.stream(call("Count.", max_tokens=3_000))
    await anext(stream)
    await becomes((1, 0), lambda: held(engine))
    await stream.aclose()  # type: ignore[attr-defined]
    await becomes((0, 0), lambda: held(engine))


async def test_cancelling_the_caller_stops_the_call_in_the_scheduler(engine: EngineServer) -> None:
    begun = asyncio.Event()

    async def read() -> None:
        async for _ in engine.stream(call("Count again.", max_tokens=3_000)):
            begun.set()

    reader = asyncio.create_task(read())
    await begun.wait()
    await becomes((1, 0), lambda: held(engine))
    reader.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reader
    await becomes((0, 0), lambda: held(engine))


async def test_an_abort_ends_the_stream_with_a_reply_that_says_so(engine: EngineServer) -> None:
    asked = call("Count once more.", max_tokens=3_000)
    reply: Reply | None = None
    async for chunk in engine.stream(asked):
        engine.abort(asked.call_id)
        reply = chunk.reply
    assert reply is not None
    assert reply.reason == "abort"


async def test_a_call_id_is_used_once_at_a_time_and_the_first_call_is_unharmed(engine: EngineServer) -> None:
    asked = call("Count twice.", max_tokens=40)
    stream = engine.stream(asked)
    await anext(stream)
    with pytest.raises(InputError, match="is running already"):
        await answer(engine, asked)
    *_, last = [chunk async for chunk in stream]
    assert last.reply is not None
    assert (last.reply.reason, last.reply.output_tokens) == ("length", 40)


async def test_the_openai_protocol_answers_whole_and_in_pieces(engine: EngineServer) -> None:
    body = {"model": "default", "messages": [{"role": "user", "content": LONG}], "max_tokens": 6, "temperature": 0}
    whole = await engine.openai_chat(body, call("").caller, None)
    assert isinstance(whole, dict)
    assert whole["choices"][0]["finish_reason"] == "length"
    assert whole["usage"]["completion_tokens"] == 6
    stream = await engine.openai_chat(
        {**body, "stream": True, "stream_options": {"include_usage": True}}, call("").caller, None
    )
    assert not isinstance(stream, dict)
    *events, done, rest = b"".join([piece async for piece in stream]).split(b"\n\n")
    assert (done, rest) == (b"data: [DONE]", b"")
    told = [json.loads(event.removeprefix(b"data: ")) for event in events]
    text = "".join(choice["delta"].get("content") or "" for chunk in told for choice in chunk["choices"])
    assert text == whole["choices"][0]["message"]["content"]
    assert told[-1]["usage"]["completion_tokens"] == 6
    tiers = next(chunk["sglext"]["cached_tokens_details"] for chunk in told if chunk.get("sglext"))
    assert tiers["device"] == whole["usage"]["prompt_tokens"] - 1


async def test_leaving_an_openai_stream_stops_the_call(engine: EngineServer) -> None:
    body = {
        "messages": [{"role": "user", "content": "Count."}],
        "max_tokens": 3_000,
        "stream": True,
        "rid": "foreign-1",
    }
    stream = await engine.openai_chat(body, None, None)
    assert not isinstance(stream, dict)
    await anext(stream)
    await becomes((1, 0), lambda: held(engine))
    await stream.aclose()  # type: ignore[attr-defined]
    await becomes((0, 0), lambda: held(engine))


async def test_bad_openai_requests_are_refused_with_a_reason(engine: EngineServer) -> None:
    messages = [{"role": "user", "content": "Hello."}]
    with pytest.raises(NotFoundError, match="model 'gpt-9' is not served"):
        await engine.openai_chat({"model": "gpt-9", "messages": messages}, None, None)
    with pytest.raises(InputError, match="temperature"):
        await engine.openai_chat({"messages": messages, "temperature": "hot"}, None, None)
    with pytest.raises(InputError, match="SGLang refused"):
        await engine.openai_chat({"messages": messages, "max_tokens": -5}, None, None)


async def test_metrics_show_ours_and_sglangs(engine: EngineServer) -> None:
    await answer(engine, call("Measure.", max_tokens=2))
    text = engine.metrics_text()
    assert 'pbkv_engine_calls_total{reason="length",replica="tests"}' in text
    assert "sglang:num_running_reqs" in text
    assert "sglang:time_to_first_token_seconds" in text


async def test_an_engine_belongs_to_the_loop_of_its_first_call(engine: EngineServer) -> None:
    await engine.check_health()
    with pytest.raises(EngineError, match="another event loop"):
        await asyncio.to_thread(lambda: asyncio.run(engine.check_health()))


async def test_the_host_tier_answers_what_the_device_tier_lost(engine: EngineServer) -> None:
    """The pool holds 8,192 tokens: a dozen long prompts push the first one out of the device tier."""
    first = await answer(engine, call(f"Host. {LONG}", max_tokens=8))
    for number in range(16):
        await answer(engine, call(f"{number} pushes. {LONG}", max_tokens=1))
    again = await answer(engine, call(f"Host. {LONG}", max_tokens=8))
    assert again.host_cached_tokens > 0
    assert again.host_cached_tokens + again.device_cached_tokens == again.prompt_tokens - 1
    assert replace(again, **_varying(first)) == first


def _varying(reply: Reply) -> dict[str, object]:
    names = ("device_cached_tokens", "host_cached_tokens", "seconds", "first_token_seconds")
    return {name: getattr(reply, name) for name in names}

"""OpenAI's protocol from the stock client through the gateway to a real SGLang engine with the tiny model."""

import asyncio
from typing import Any

import httpx
import pytest

from deployments.gateway import GatewayOptions, create_app
from pbkv_ray.core.events import CallFinished, RunEnded
from pbkv_ray.engine.server import EngineServer
from tests.e2e import openai_script
from tests.shells.fake_runs import FakeRunService
from tests.shells.gateway_kit import served

pytestmark = pytest.mark.engine

KEYS = ("alice-0123456789abcdef", "bob-0123456789abcdef")
CHAT = "/v1/chat/completions"


def _finished(events: list[Any]) -> list[CallFinished]:
    return [event for event in events if isinstance(event, CallFinished)]


async def test_the_openai_script_runs_on_a_real_engine(engine: EngineServer) -> None:
    events: list[Any] = []
    async with served(create_app(FakeRunService(), engine, workflows={}, emit=events.append)) as url:
        seen = await asyncio.to_thread(openai_script.exercise, url)
    assert seen["streamed"] == seen["text"]  # greedy: streamed or not, the same words
    assert seen["usage"]["completion_tokens"] == 8
    first, second = _finished(events)
    assert (first.reason, first.output_tokens) == ("length", 8)
    # The second call of the run finds the first one's prompt; the tiers are told in a stream, too.
    assert second.device_cached_tokens + second.host_cached_tokens >= first.prompt_tokens - engine.options.page_size
    assert events[-1] == RunEnded("ext:openai-script", "completed", events[-1].at_s)


async def test_tenants_share_no_cache(engine: EngineServer) -> None:
    events: list[Any] = []
    options = GatewayOptions(api_keys=KEYS, salt_secret="a secret of the server")
    body = {
        "messages": [{"role": "user", "content": "A prompt of the tenants' test. " * 20}],
        "max_tokens": 2,
        "temperature": 0,
    }
    app = create_app(FakeRunService(), engine, options, workflows={}, emit=events.append)
    async with served(app) as url, httpx.AsyncClient(base_url=url, timeout=60) as client:
        for key in (KEYS[0], KEYS[1], KEYS[0]):
            # A caller's own salt and key do not open another tenant's cache.
            asked = {**body, "cache_salt": "shared", "extra_key": "shared"}
            answer = await client.post(CHAT, json=asked, headers={"x-api-key": key, "x-pbkv-run-id": "r"})
            assert answer.status_code == 200, answer.text
    cached = [event.device_cached_tokens + event.host_cached_tokens for event in _finished(events)]
    assert (cached[0], cached[1]) == (0, 0)
    assert cached[2] > 50

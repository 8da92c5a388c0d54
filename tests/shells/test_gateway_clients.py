"""The stock clients, unchanged, against a real server on loopback."""

import asyncio

import pytest

from deployments.gateway import GatewayOptions
from tests.e2e import openai_script, sdk_script
from tests.shells.gateway_kit import Kit

KEY = "0123456789abcdef-key"
SECURED = GatewayOptions(api_keys=(KEY,), salt_secret="a secret of the server")


@pytest.mark.parametrize("options", [GatewayOptions(), SECURED], ids=["open", "keys"])
async def test_langgraph_sdk_works_unchanged(options: GatewayOptions) -> None:
    kit = Kit(options)
    async with kit.served() as url:
        seen = await sdk_script.exercise(
            url, "hover", {"steps": 2}, {"steps": 1, "hold": True}, KEY if options.api_keys else ""
        )
    for said in (*seen["unknown"].values(), seen["busy"].pop("refused")):
        assert said
    assert seen["unknown"].pop("thread") == "thread 'no-such-thread' does not exist; POST /threads makes one"
    assert seen["unknown"].pop("assistant") == (
        "assistant 'no-such-workflow' is unknown; the workflows here are: hover, swe"
    )
    assert seen["unknown"].pop("run") == "run 'no-such-run' does not exist"
    assert seen == {
        "assistants": {
            "count": 2,
            "graph_nodes": ["__start__"],
            "schemas": ["graph_id", "input_schema", "output_schema", "state_schema"],
        },
        "background": {"values": {"step": 2}, "status": "success", "listed": [{"status": "success"}]},
        "stream": {"events": ["end", "metadata", "updates", "values"], "last_values": {"step": 2}},
        "threads": {"next": [], "history": 1},
        "busy": {"cancelled": "interrupted", "queued": "success"},
        "stateless": {
            "values": {"step": 2},
            "first": "metadata",
            "last": "end",
            "batch": ["success", "success"],
        },
        "unknown": {},
    }


@pytest.mark.parametrize("options", [GatewayOptions(), SECURED], ids=["open", "keys"])
async def test_the_openai_client_works_unchanged(options: GatewayOptions) -> None:
    kit = Kit(options)
    async with kit.served() as url:
        seen = await asyncio.to_thread(openai_script.exercise, url, KEY)
    assert seen == {
        "model": "org/tiny",
        "text": "Hello there",
        "streamed": "Hello there",
        "reason": "stop",
        "refused": ["UnprocessableEntityError", "NotFoundError"],
        "usage": {"prompt_tokens": 9, "completion_tokens": 2},
    }

"""The door: keys and tenants, hosts, sizes, depths, what only the server may set, and errors of our own making."""

import json
import logging
from collections.abc import AsyncIterator

import httpx
import pytest

from deployments.gateway import GatewayOptions, check_exposure
from deployments.http.auth import Keys
from pbkv_ray.errors import ConfigError, ConflictError, EngineError, UnavailableError
from tests.shells.gateway_kit import Kit, eventually

ALICE, BOB = "alice-0123456789abcdef", "bob-0123456789abcdef"
SECURED = GatewayOptions(api_keys=(ALICE, BOB), salt_secret="a secret of the server")
JSON = {"content-type": "application/json"}


async def test_a_request_needs_a_key_in_either_header() -> None:
    kit = Kit(SECURED)
    async with kit.client() as client:
        answers = {
            name: (await client.get("/info", headers=headers)).status_code
            for name, headers in {
                "none": {},
                "wrong": {"x-api-key": "alice-0123456789abcdeX"},
                "basic": {"authorization": f"Basic {ALICE}"},
                "x-api-key": {"x-api-key": ALICE},
                "bearer": {"authorization": f"Bearer {BOB}"},
            }.items()
        }
        refused = await client.get("/info")
        openai = await client.get("/v1/models")
        health = await client.get("/ok")
        hidden = await client.get("/metrics")
    assert answers == {"none": 401, "wrong": 401, "basic": 401, "x-api-key": 200, "bearer": 200}
    assert refused.headers["www-authenticate"] == "Bearer"
    assert refused.json()["detail"].startswith("the request carries no valid API key; send one as")
    assert openai.json()["error"]["type"] == "authentication_error"
    assert (health.status_code, hidden.status_code) == (200, 401)


async def test_each_key_has_a_salt_that_only_the_server_can_derive() -> None:
    kit = Kit(SECURED)
    asked = {
        "assistant_id": "hover",
        "metadata": {"pbkv_tenant": "bob"},
        "config": {"configurable": {"cache_salt": "s"}},
    }
    async with kit.client() as client:
        for key in (ALICE, BOB, ALICE):
            await client.post("/runs", json=asked, headers={"x-api-key": key})
    salts = [request.cache_salt for request in kit.service.requests]
    assert salts[0] == salts[2] != salts[1]
    assert all(salt is not None and len(salt) == 32 for salt in salts)
    other = Keys(GatewayOptions(api_keys=(ALICE,), salt_secret="another secret of a server"))
    tenant = other.tenant({"x-api-key": ALICE})
    assert tenant is not None and tenant.cache_salt != salts[0]
    assert [request.config for request in kit.service.requests] == [{}, {}, {}]


async def test_without_keys_there_is_no_salt() -> None:
    kit = Kit()
    async with kit.client() as client:
        await client.post("/runs", json={"assistant_id": "hover"})
        await client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "hi"}]})
    assert kit.service.requests[0].cache_salt is None
    assert kit.chat.asked[0][2] is None


async def test_tenants_do_not_see_each_others_threads_and_runs() -> None:
    kit = Kit(SECURED)
    async with kit.client() as client:
        alice, bob = {"x-api-key": ALICE}, {"x-api-key": BOB}
        await client.post("/threads", json={"thread_id": "t1"}, headers=alice)
        run = (await client.post("/threads/t1/runs", json={"assistant_id": "hover"}, headers=alice)).json()
        stateless = (await client.post("/runs", json={"assistant_id": "hover"}, headers=alice)).json()
        await eventually(kit.service.runs[stateless["run_id"]].ended)
        paths = [
            "/threads/t1",
            "/threads/t1/state",
            "/threads/t1/runs",
            f"/threads/t1/runs/{run['run_id']}",
            f"/threads/t1/runs/{run['run_id']}/join",
            f"/threads/t1/runs/{run['run_id']}/stream",
            f"/threads/{stateless['thread_id']}/state",
            f"/v1/runs/{run['run_id']}",
            f"/v1/runs/{run['run_id']}/calls",
        ]
        hers = [(await client.get(path, headers=alice)).status_code for path in paths]
        his = [(await client.get(path, headers=bob)).status_code for path in paths]
        taken = await client.post("/threads", json={"thread_id": "t1", "if_exists": "do_nothing"}, headers=bob)
        intruding = await client.post("/threads/t1/runs", json={"assistant_id": "hover"}, headers=bob)
        cancelling = await client.post(f"/threads/t1/runs/{run['run_id']}/cancel", headers=bob)
        listed = [(await client.get("/v1/runs", headers=who)).json() for who in (alice, bob)]
        found = [(await client.post("/threads/search", json={}, headers=who)).json() for who in (alice, bob)]
    assert (hers, his) == ([200] * 9, [404] * 9)
    assert (taken.status_code, intruding.status_code, cancelling.status_code) == (404, 404, 404)
    assert ([len(rows) for rows in listed], [len(rows) for rows in found]) == ([2, 0], [1, 0])


async def test_keys_are_in_no_log_and_no_repr(caplog: pytest.LogCaptureFixture) -> None:
    kit = Kit(SECURED)
    kit.chat.error = EngineError("the scheduler is gone")
    with caplog.at_level(logging.DEBUG):
        async with kit.client() as client:
            for key in (ALICE, "not-a-key-of-ours-000"):
                body = {"messages": [{"role": "user", "content": "hi"}]}
                await client.post("/v1/chat/completions", json=body, headers={"authorization": f"Bearer {key}"})
    text = caplog.text + repr(SECURED) + repr(Keys(SECURED).tenant({"x-api-key": ALICE}))
    assert "the scheduler is gone" in caplog.text
    for secret in (ALICE, BOB, "not-a-key-of-ours-000", SECURED.salt_secret):
        assert secret not in text


def test_nothing_listens_beyond_loopback_without_a_key() -> None:
    for host in ("127.0.0.1", "localhost", "::1", "127.8.8.8"):
        check_exposure(host, GatewayOptions())
    for host in ("0.0.0.0", "::", "10.0.0.5", "example.org", ""):
        with pytest.raises(ConfigError, match="no API key is set"):
            check_exposure(host, GatewayOptions())
        check_exposure(host, SECURED)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"api_keys": ("short",), "salt_secret": "x" * 16}, "an API key has 5 characters"),
        ({"api_keys": ("with a space in it",), "salt_secret": "x" * 16}, "printable ASCII"),
        ({"api_keys": (ALICE,)}, "salt_secret is not"),
        ({"max_body_bytes": 0}, "GatewayOptions.max_body_bytes is 0; it must be above zero"),
    ],
)
def test_weak_options_are_refused_at_start(options: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        GatewayOptions(**options)  # type: ignore[arg-type]


async def test_without_keys_only_loopback_names_are_served() -> None:
    kit = Kit(GatewayOptions(allowed_hosts=("gateway.internal",)))
    async with kit.client() as client:
        answers = {
            host: (await client.get("/info", headers={"host": host})).status_code
            for host in ("localhost:8000", "127.0.0.1", "[::1]:8000", "gateway.internal:80", "evil.example", "")
        }
        health = await client.get("/ok", headers={"host": "10.1.2.3"})
    assert answers == {
        "localhost:8000": 200,
        "127.0.0.1": 200,
        "[::1]:8000": 200,
        "gateway.internal:80": 200,
        "evil.example": 421,
        "": 421,
    }
    assert health.status_code == 200


async def test_a_body_must_be_json_by_name() -> None:
    kit = Kit()
    async with kit.client() as client:
        answers = {
            kind: (await client.post("/threads", content=b"{}", headers={"content-type": kind})).status_code
            for kind in ("application/json", "application/json; charset=utf-8", "text/plain", "")
        }
        empty = await client.post("/threads")
    assert answers == {"application/json": 200, "application/json; charset=utf-8": 200, "text/plain": 415, "": 415}
    assert empty.status_code == 200


async def test_a_large_body_is_refused_by_its_length_and_while_it_arrives() -> None:
    kit = Kit(GatewayOptions(max_body_bytes=1_000))
    sent = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal sent
        while sent < 1_000_000:
            sent += 100
            yield b" " * 100

    async with kit.served() as url, httpx.AsyncClient(base_url=url) as client:
        told = await client.post("/threads", content=b" " * 1_001, headers=JSON)
        streamed = await client.post("/v1/chat/completions", content=endless(), headers=JSON)
        fits = await client.post("/threads", content=b"{}" + b" " * 998, headers=JSON)
    assert told.status_code == 413
    assert told.json() == {"detail": "the body is larger than 1000 bytes; send less, or raise max_body_bytes"}
    assert (streamed.status_code, streamed.json()["error"]["type"]) == (413, "invalid_request_error")
    assert fits.status_code == 200


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"{", "the body is not JSON: EOF while parsing an object at line 1 column 1; it starts with b'{'"),
        (b"\xff\xfe", "the body is not JSON: expected value"),
        (b"[" * 100_000, "the body is nested deeper than 64 levels; flatten it"),
        (b'{"metadata":' + b'{"a":' * 70 + b"1" + b"}" * 71, "the body is nested deeper than 64 levels; flatten it"),
        (b'{"metadata": {"a": NaN}}', "the body is not JSON: expected value"),
        (b'{"metadata": {"a": 1e999}}', "the body holds a number beyond the range of a double"),
        (b'{"metadata": {"a": ' + b"9" * 5_000 + b"}}", "the body is not JSON: number out of range"),
        (b'{"metadata": {"a": "x\\u0000"}}', "the body holds the NUL character, in 'x\\x00'; no store keeps it"),
        (b'{"metadata": {"a": "\\ud800"}}', "the body is not JSON: unexpected end of hex escape"),
        (b'{"metadata": 5}', "the body: metadata is 5; input should be a valid dictionary"),
        (b'"text"', "the body: it is 'text'; input should be a valid dictionary"),
    ],
    ids=["cut", "bytes", "deep", "deep-closed", "nan", "infinity", "digits", "nul", "surrogate", "type", "string"],
)
async def test_a_bad_body_gets_a_sentence(body: bytes, says: str) -> None:
    kit = Kit()
    async with kit.client() as client:
        answer = await client.post("/threads", content=body, headers=JSON)
    assert answer.status_code == 422
    assert answer.json()["detail"].startswith(says)
    assert kit.service.threads == {}


async def test_what_only_the_server_may_set_is_dropped_and_counted() -> None:
    kit = Kit()
    async with kit.client() as client:
        await client.post(
            "/runs",
            json={
                "assistant_id": "hover",
                "input": {"priority": "the caller's own word"},
                "config": {
                    "callbacks": ["x"],
                    "run_id": "mine",
                    "configurable": {"thread_id": "another's", "__pregel_x": 1, "cache_salt": "s", "tone": "kind"},
                },
            },
        )
        await client.post(
            "/v1/chat/completions",
            json={
                "model": "org/tiny",
                "messages": [{"role": "user", "content": "hi", "priority": 1}],
                "tools": [{"type": "function", "function": {"parameters": {"properties": {"priority": {}}}}}],
                "top_k": 5,
                "cache_salt": "s",
                "extra_key": "k",
                "custom_params": {"run": "another's"},
                "priority": 9,
                "kv_hints": {},
                "rid": "another's",
                "lora_path": "/etc",
                "return_hidden_states": True,
                "data_parallel_rank": 3,
                "bootstrap_host": "10.0.0.1",
                "stop_regex": "(a+)+$",
                "a_field_of_a_later_sglang": 1,
                "extra_body": {"routing_key": "r", "session_params": {}, "min_p": 0.1},
            },
        )
        text = (await client.get("/metrics")).text
    assert kit.service.requests[0].config == {"configurable": {"tone": "kind"}}
    assert kit.service.requests[0].input == {"priority": "the caller's own word"}
    body = kit.chat.asked[0][0]
    assert len(body.pop("rid")) == 32
    assert body == {
        "model": "org/tiny",
        "messages": [{"role": "user", "content": "hi", "priority": 1}],
        "tools": [{"type": "function", "function": {"parameters": {"properties": {"priority": {}}}}}],
        "top_k": 5,
        "min_p": 0.1,
    }
    assert 'pbkv_http_stripped_fields_total{field="cache_salt",part="gateway"} 2.0' in text
    assert 'pbkv_http_stripped_fields_total{field="configurable",part="gateway"} 2.0' in text
    assert 'pbkv_http_stripped_fields_total{field="unknown",part="gateway"} 1.0' in text
    assert 'pbkv_http_stripped_fields_total{field="bootstrap_host",part="gateway"} 1.0' in text


@pytest.mark.parametrize(
    ("error", "status", "retry"),
    [
        (ConflictError("the thread is busy"), 409, None),
        (UnavailableError("the runner is starting"), 503, "1"),
    ],
)
async def test_errors_of_the_service_keep_their_status(error: Exception, status: int, retry: str | None) -> None:
    kit = Kit()

    async def fails(thread_id: str) -> dict[str, object]:
        raise error

    kit.service.get_thread = fails  # type: ignore[method-assign]
    async with kit.client() as client:
        answer = await client.get("/threads/t1")
    assert (answer.status_code, answer.json()) == (status, {"detail": str(error)})
    assert answer.headers.get("retry-after") == retry


async def test_an_error_that_ray_wrapped_is_answered_as_itself() -> None:
    class RayTaskError(ConflictError):
        def __init__(self, cause: Exception) -> None:
            super().__init__("Traceback of another machine")
            self.cause = cause

    kit = Kit()

    async def fails(thread_id: str) -> dict[str, object]:
        raise RayTaskError(ConflictError("the thread is busy"))

    kit.service.get_thread = fails  # type: ignore[method-assign]
    async with kit.client() as client:
        answer = await client.get("/threads/t1")
    assert (answer.status_code, answer.json()) == (409, {"detail": "the thread is busy"})


async def test_a_bug_is_a_500_that_tells_nothing() -> None:
    kit = Kit()

    async def fails(thread_id: str) -> dict[str, object]:
        raise ZeroDivisionError("secret detail")

    kit.service.get_thread = fails  # type: ignore[method-assign]
    async with kit.served() as url, httpx.AsyncClient(base_url=url) as client:
        answer = await client.get("/threads/t1")
    assert answer.status_code == 500
    assert answer.json() == {"detail": "the gateway failed on this request; its log says why"}


async def test_requests_beyond_the_bound_are_told_to_come_back() -> None:
    kit = Kit(GatewayOptions(max_open_requests=1))
    async with kit.served() as url, httpx.AsyncClient(base_url=url) as client:
        asked = {"assistant_id": "hover", "input": {"steps": 0, "hold": True}}
        async with client.stream("POST", "/runs/stream", json=asked) as response:
            assert response.status_code == 200
            refused = await client.get("/info")
            health = await client.get("/ok")
    assert (refused.status_code, refused.headers["retry-after"], health.status_code) == (503, "1", 200)
    assert json.loads(refused.text)["detail"] == "1 requests are open, the most at a time; try again"

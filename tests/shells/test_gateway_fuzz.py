"""Whatever is sent, the gateway answers below 500, in its protocol's error shape, and with a sentence."""

import json
from typing import Any

import httpx
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from deployments.gateway import GatewayOptions
from deployments.http import models
from deployments.http.reserved import SERVER_ONLY
from tests.shells.gateway_kit import Kit

KEY = "0123456789abcdef-key"
SMALL = GatewayOptions(max_body_bytes=20_000, max_scan=100)
SECURED = GatewayOptions(max_body_bytes=20_000, api_keys=(KEY,), salt_secret="a secret of the server")

POSTS: dict[str, type[Any]] = {
    "/threads": models.ThreadCreate,
    "/threads/search": models.ThreadSearch,
    "/threads/count": models.ThreadCount,
    "/threads/t1/state": models.StateUpdate,
    "/threads/t1/state/checkpoint": models.StateAt,
    "/threads/t1/history": models.History,
    "/threads/t1/runs": models.RunCreate,
    "/threads/t1/runs/stream": models.RunCreate,
    "/threads/t1/runs/wait": models.RunCreate,
    "/runs": models.RunCreate,
    "/runs/stream": models.RunCreate,
    "/runs/wait": models.RunCreate,
    "/runs/cancel": models.CancelMany,
    "/assistants/search": models.AssistantSearch,
    "/assistants/count": models.AssistantCount,
    "/assistants/hover/versions": models.AssistantVersions,
    "/assistants/hover/latest": models.AssistantLatest,
    "/v1/chat/completions": models.Body,
}
PATHS = [*POSTS, "/threads/t1", "/threads/t1/runs/r1", "/threads/t1/runs/r1/join", "/threads/t1/runs/r1/stream"]
PATHS += ["/threads/t1/runs/r1/cancel", "/assistants/hover/graph", "/v1/runs", "/v1/runs/r1/calls", "/v1/models/x"]
PATHS += ["/metrics", "/info", "/runs/batch", "/threads/t1/history", "/threads/t1/state", "/threads/t1/state/c1"]

TEXT = st.text(max_size=20) | st.sampled_from(["hover", "t1", "values", "*", "", "a" * 300, "\u0000", "é", "-1", "0"])
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | TEXT
JSON = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3), max_leaves=8
)
CHAT = ["messages", "model", "stream", "stream_options", "max_tokens", "extra_body", "tools", "stop", *SERVER_ONLY]
# Values that are nearly right reach further than noise.
LIKELY = st.sampled_from(
    [
        "hover",
        "values",
        ["values", "updates"],
        "reject",
        "enqueue",
        {"steps": 1},
        {"fail": "x"},
        {"configurable": {"thread_id": "x", "__y": 1}},
        {"checkpoint_id": "c1"},
        [{"role": "user", "content": "hi"}],
        {"include_usage": 1},
        True,
        10,
        ["t1", "t2"],
        {},
        [],
        10**30,
        -(10**30),
    ]
)


def bodies(path: str, workflow: str = "hover") -> st.SearchStrategy[Any]:
    fields = CHAT if path.startswith("/v1/chat") else list(POSTS[path].model_fields)
    shaped = st.dictionaries(st.sampled_from(fields) | TEXT, LIKELY | JSON, max_size=6)
    started: dict[str, Any] = {"assistant_id": workflow} if "assistant_id" in fields else {}
    started |= {"messages": [{"role": "user", "content": "hi"}]} if "messages" in fields else {}
    return shaped | shaped.map(lambda body: {**started, **body}) | JSON


def checked(path: str, answer: httpx.Response) -> None:
    assert answer.status_code < 500, (path, answer.status_code, answer.text)
    if answer.status_code < 400:
        return
    body = answer.json()
    if path.startswith(("/v1/chat", "/v1/models")):
        said = body["error"]["message"]
        assert set(body["error"]) == {"message", "type", "param", "code"}
    else:
        said = body["detail"]
        assert set(body) == {"detail"}
    assert isinstance(said, str) and len(said.split()) > 3, body
    assert len(said) < 2_000 and said.isprintable(), said


OPEN, LOCKED = Kit(SMALL), Kit(SECURED)
APPS = {id(kit): kit.app() for kit in (OPEN, LOCKED)}


async def send(kit: Kit, method: str, path: str, **request: Any) -> httpx.Response:
    """To an application of its own, whose exceptions fail the test; what earlier examples left is forgotten."""
    kit.service.threads.clear()
    kit.service.runs.clear()
    kit.events.clear()
    await kit.service.create_thread("t1", {}, "do_nothing")
    transport = httpx.ASGITransport(APPS[id(kit)])
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        return await client.request(method, path, **request)


def encoded(body: Any) -> bytes:
    """JSON as loose as Python's: NaN, infinities and lone surrogates included."""
    return json.dumps(body).encode("utf-8", "surrogatepass")


FUZZ = settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)


@FUZZ
@given(st.sampled_from(sorted(POSTS)).flatmap(lambda path: st.tuples(st.just(path), bodies(path))))
@example(("/runs", {"assistant_id": "hover", "metadata": {"pbkv_tenant": 1}, "config": {"configurable": None}}))
@example(("/v1/chat/completions", {"messages": [{"role": "user"}], "stream": True, "stream_options": None}))
async def test_bodies_of_any_shape(sent: tuple[str, Any]) -> None:
    path, body = sent
    answer = await send(OPEN, "POST", path, content=encoded(body), headers={"content-type": "application/json"})
    checked(path, answer)


@FUZZ
@given(
    st.sampled_from(sorted(PATHS)),
    st.sampled_from(["GET", "POST", "PATCH", "DELETE", "PUT", "HEAD", "OPTIONS"]),
    st.binary(max_size=40) | st.sampled_from([b"", b"{}", b"[" * 5_000, b"\xff", b'{"a":' * 100]),
    st.sampled_from(["application/json", "text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""]),
)
async def test_any_method_any_bytes_any_type(path: str, method: str, content: bytes, kind: str) -> None:
    answer = await send(OPEN, method, path, content=content, headers={"content-type": kind})
    if method != "HEAD":
        checked(path, answer)
    assert answer.status_code < 500


NAMES = ["limit", "offset", "status", "select", "wait", "action", "before", "stream_mode", "cancel_on_disconnect"]
ASCII = st.text(st.characters(min_codepoint=0x20, max_codepoint=0x7E), max_size=30)


@FUZZ
@given(
    st.sampled_from(sorted(PATHS)),
    st.sampled_from(["GET", "POST", "DELETE"]),
    st.dictionaries(st.sampled_from(NAMES), TEXT | st.sampled_from(["1", "true", "success", "interrupt"]), max_size=4),
    st.dictionaries(
        st.sampled_from(["last-event-id", "x-api-key", "authorization", "x-pbkv-run-id", "x-pbkv-run-final", "host"]),
        ASCII | st.sampled_from(["localhost", "3", "-1", "Bearer", "[::1", f"Bearer {KEY}"]),
        max_size=3,
    ),
    st.booleans(),
)
async def test_any_query_and_any_headers(
    path: str, method: str, query: dict[str, str], headers: dict[str, str], secured: bool
) -> None:
    checked(path, await send(LOCKED if secured else OPEN, method, path, params=query, headers=headers, json={}))


@FUZZ
@given(st.text(max_size=40), st.sampled_from(["GET", "DELETE", "POST", "PATCH"]))
@example("%00", "GET")
@example("..%2f..%2fetc", "GET")
@example("a" * 5_000, "DELETE")
async def test_any_id_in_a_path(name: str, method: str) -> None:
    quoted = name if "%" in name and name.isascii() else httpx.QueryParams({"x": name})
    part = quoted if isinstance(quoted, str) else str(quoted)[2:]
    for path in (f"/threads/{part}", f"/threads/t1/runs/{part}", f"/assistants/{part}", f"/v1/runs/{part}/calls"):
        checked(path, await send(OPEN, method, path, json={}))

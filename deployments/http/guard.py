"""The door: every request passes here first. Host, key, size, number of open requests, and one line of metrics.

A plain ASGI middleware, so that streams stay streams and a client's leaving reaches whoever serves it.
"""

from collections.abc import Mapping
from time import perf_counter

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deployments.http.auth import Keys
from deployments.http.errors import RefusedError, answer, shown
from deployments.http.options import LOOPBACK_HOSTS, GatewayOptions
from deployments.http.page import PAGES
from deployments.metrics import GatewayMetrics
from pbkv_ray.errors import PbkvError, UnavailableError

OPEN_PATHS = ("/ok", "/docs", "/openapi.json", *PAGES)  # these tell nothing about runs, tenants or load


class Guard:
    def __init__(self, app: ASGIApp, options: GatewayOptions, metrics: GatewayMetrics) -> None:
        self._app = app
        self._options = options
        self._metrics = metrics
        self._keys = Keys(options)
        self._open = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":  # none is offered; whoever adds one must come through the guard
            await send({"type": "websocket.close", "code": 1008})
            return
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = perf_counter()
        status = 500

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        self._open += 1
        self._metrics.open_requests.set(self._open)
        try:
            headers = Headers(scope=scope)
            try:
                scope.setdefault("state", {})["tenant"] = self._admit(scope["path"], headers)
            except PbkvError as error:
                await answer(scope["path"], error)(scope, receive, watched)
                return
            await self._app(scope, self._limited(receive), watched)
        finally:
            self._open -= 1
            self._metrics.open_requests.set(self._open)
            route = getattr(scope.get("route"), "path", "unmatched")
            self._metrics.request(route, scope["method"], status, perf_counter() - started)

    def _admit(self, path: str, headers: Mapping[str, str]) -> object:
        options = self._options
        if self._open > options.max_open_requests and path not in OPEN_PATHS:
            raise UnavailableError(f"{options.max_open_requests} requests are open, the most at a time; try again")
        length = headers.get("content-length", "0")
        if length.isascii() and length.isdigit() and int(length[:20]) > options.max_body_bytes:
            raise _too_large(options.max_body_bytes)
        if path in OPEN_PATHS:
            return None
        if self._keys.required:
            try:
                return self._keys.tenant(headers)
            except RefusedError:
                self._metrics.refused_keys.inc()
                raise
        # Without keys, whoever reaches the port is trusted; a web page that renames itself to 127.0.0.1 must not be.
        host = _host_name(headers.get("host", ""))
        if host not in LOOPBACK_HOSTS and host not in options.allowed_hosts:
            raise RefusedError(
                421,
                f"host {shown(host)} is none of ours; without API keys only loopback names are served: "
                "set api_keys_file (--api-keys), or add the name to allowed_hosts",
            )
        return None

    def _limited(self, receive: Receive) -> Receive:
        """FastAPI's own limit (max_body_size) counts alike, but answers in plain text."""
        seen = 0
        limit = self._options.max_body_bytes

        async def limited() -> Message:
            nonlocal seen
            message = await receive()
            if message["type"] == "http.request":
                seen += len(message.get("body", b""))
                if seen > limit:
                    raise _too_large(limit)
            return message

        return limited


def _too_large(limit: int) -> RefusedError:
    return RefusedError(413, f"the body is larger than {limit} bytes; send less, or raise max_body_bytes")


def _host_name(host: str) -> str:
    """The Host header without its port; IPv6 without its brackets."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.partition(":")[0].lower()

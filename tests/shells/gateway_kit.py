"""What the gateway's tests share: an application over fakes, in process or behind a real server on loopback."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import uvicorn
from fastapi import FastAPI

from deployments.gateway import GatewayOptions, create_app
from tests.shells.fake_runs import FakeChat, FakeRunService

WORKFLOWS = {"hover": "Verifies a claim over several hops.", "swe": "Fixes an issue."}


@dataclass
class Kit:
    options: GatewayOptions = field(default_factory=GatewayOptions)
    parts: dict[str, Any] = field(default_factory=dict)
    service: FakeRunService = field(default_factory=FakeRunService)
    chat: FakeChat = field(default_factory=FakeChat)
    events: list[Any] = field(default_factory=list)
    watch: Any = None  # the controller's snapshots

    def app(self) -> FastAPI:
        return create_app(
            self.service,
            self.chat,
            self.options,
            workflows=WORKFLOWS,
            emit=self.events.append,
            metrics_parts=self.parts,
            clock=lambda: 1_000.0,
            **({} if self.watch is None else {"watch": self.watch}),
        )

    def client(self, **headers: str) -> httpx.AsyncClient:
        """In process. An exception that the application lets through fails the test."""
        transport = httpx.ASGITransport(self.app())
        return httpx.AsyncClient(transport=transport, base_url="http://localhost", headers=headers)

    def served(self, port: int = 0) -> contextlib.AbstractAsyncContextManager[str]:
        return served(self.app(), port)


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.up = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.up.set()


@contextlib.asynccontextmanager
async def served(app: FastAPI, port: int = 0) -> AsyncIterator[str]:
    """`app` behind uvicorn on a port of loopback, by default a free one; the address."""
    server = _Server(
        uvicorn.Config(app, host="127.0.0.1", port=port, log_level="error", lifespan="on", timeout_graceful_shutdown=2)
    )
    serving = asyncio.create_task(server.serve())
    try:
        await eventually(server.up)
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        await serving


async def eventually(happened: asyncio.Event, seconds: float = 10.0) -> None:
    """Fails the test when `happened` does not, in a time that only a hang takes."""
    await asyncio.wait_for(happened.wait(), seconds)

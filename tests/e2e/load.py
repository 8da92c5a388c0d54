"""An application on the tiny model, a load of background runs on it, and how to wait for what becomes of them."""

import asyncio
import socket
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from langgraph_sdk import get_client

RUNS = 12
ROUNDS = 8
PATIENCE_S = 900.0  # for whatever must become so: an engine starts in minutes where others want the cores too
ALIVE = ("pending", "running")
TASK = "The pump was replaced on Tuesday and the pressure rose; the committee wrote down what had been said. "


@contextmanager
def served(name: str, model: Path, database: str, **more: Any) -> Iterator[str]:
    """The URL of an application of its own with the echo workflow; `more` are arguments of AppArgs."""
    from deployments.app import run_local, stop_application
    from deployments.settings import AppArgs

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    args = {
        "model": str(model),
        "device_pool_tokens": 8_192,
        "context_length": 4_096,
        "engine_threads": 1,
        "database": database,
        "registry": "tests.e2e.echo_workflow:REGISTRY",
    }
    run_local(AppArgs.checked(args | more), "127.0.0.1", port, name=name)
    yield f"http://127.0.0.1:{port}"
    stop_application(name)


@dataclass
class Load:
    """Background runs of the echo workflow, submitted at once."""

    url: str
    count: int = RUNS
    threads: dict[str, str] = field(default_factory=dict)  # run -> thread
    began_s: float = 0.0

    async def submit(self, name: str) -> None:
        self.began_s = time.time()
        async with get_client(url=self.url, api_key="") as client:
            for number in range(self.count):
                asked = {"task": f"{name} {number}. {TASK * 12}", "rounds": ROUNDS, "answer_tokens": 12}
                run = await client.runs.create(None, "echo", input=asked)
                self.threads[run["run_id"]] = run["thread_id"]

    async def get(self, path: str) -> Any:
        """An answer, however often a process must be waited for."""
        async with httpx.AsyncClient(base_url=self.url, timeout=30.0) as http:
            async with asyncio.timeout(PATIENCE_S):
                while True:
                    try:
                        answer = await http.get(path)
                        if answer.status_code < 500:
                            assert answer.status_code == 200, answer.text
                            return answer.json()
                    except httpx.TransportError:
                        pass
                    await asyncio.sleep(0.5)

    async def runs(self) -> list[dict[str, Any]]:
        return list(await asyncio.gather(*(self.get(f"/v1/runs/{run}") for run in self.threads)))

    async def calls(self) -> list[dict[str, Any]]:
        found = await asyncio.gather(*(self.get(f"/v1/runs/{run}/calls") for run in self.threads))
        return [call for calls in found for call in calls]

    async def ended(self) -> list[dict[str, Any]]:
        async with asyncio.timeout(PATIENCE_S):
            while True:
                runs = await self.runs()
                if not any(run["status"] in ALIVE for run in runs):
                    return runs
                await asyncio.sleep(0.5)

    async def in_full_swing(self) -> int:
        """Waits until a quarter of the calls is done; the runs that are then in flight."""
        async with asyncio.timeout(PATIENCE_S):
            while len(await self.calls()) < self.count * ROUNDS / 4:
                await asyncio.sleep(0.2)
        return sum(run["status"] in ALIVE for run in await self.runs())


def hit(calls: Iterable[dict[str, Any]]) -> float:
    calls = list(calls)
    prompt = sum(call["prompt_tokens"] for call in calls)
    return round(sum(call["device_cached_tokens"] for call in calls) / prompt, 3) if prompt else 0.0


async def becomes(wanted: object, look: Callable[[], Awaitable[object]]) -> None:
    seen: object = None
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        try:
            if (seen := await look()) == wanted:
                return
        except Exception as error:  # whoever is asked may be starting again
            seen = error
        await asyncio.sleep(0.5)
    assert seen == wanted

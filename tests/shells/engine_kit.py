"""What the tests of real engines share."""

import asyncio
import contextlib
import itertools
from collections.abc import Awaitable, Callable, Iterable

import psutil

from pbkv_ray.core.calls import Call, Caller, Chunk, Message, Reply, Transport

LONG = "The committee met on Tuesday and wrote down what had been said. " * 40
PROMPTS = [f"Report {number}. " + "The pump was replaced and the pressure rose. " * (4 * number) for number in range(9)]

_ids = itertools.count(1)


def call(text: str, *, run: str = "run", agent: str = "judge", step: int = 1, **fields: object) -> Call:
    """A call with an id of its own; one user message."""
    caller = Caller(run, "hover", agent, step)
    return Call(f"call-{next(_ids)}", caller, (Message("user", text),), **fields)  # type: ignore[arg-type]


async def answer(transport: Transport, asked: Call) -> Reply:
    """The whole reply; what was streamed must add up to it."""
    chunks: list[Chunk] = [chunk async for chunk in transport.stream(asked)]
    reply = chunks[-1].reply
    assert reply is not None
    assert all(chunk.reply is None for chunk in chunks[:-1])
    assert "".join(chunk.text for chunk in chunks) == reply.text
    return reply


async def becomes(wanted: object, look: Callable[[], Awaitable[object]], seconds: float = 60.0) -> None:
    """Wait until `look()` is `wanted`; a test that waits in vain fails with what it saw last."""
    seen: object = None
    deadline = asyncio.get_running_loop().time() + seconds
    while asyncio.get_running_loop().time() < deadline:
        seen = await look()
        if seen == wanted:
            return
        await asyncio.sleep(0.05)
    assert seen == wanted


async def alive(pids: Iterable[int]) -> list[int]:
    """Those of `pids` that still run; a zombie only waits for its parent to look."""
    found = []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                found.append(pid)
    return found

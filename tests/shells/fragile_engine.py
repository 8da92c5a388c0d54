"""Run as a program by test_engine_process: an engine of its own, compared, stuck, killed; tells what it saw as JSON.

A process has one engine, and the tests' own is taken. SGLang's attention and write_back, the others' opposites.
"""

import asyncio
import json
import os
import shutil
import signal
import sys
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import psutil

from pbkv_ray.config import EngineOptions
from pbkv_ray.engine.server import EngineServer
from pbkv_ray.errors import PbkvError
from tests.shells.engine_kit import LONG, PROMPTS, alive, answer, becomes, call

Seen = dict[str, Any]


async def compared(server: EngineServer) -> Seen:
    cold = await asyncio.gather(*(answer(server, call(text, max_tokens=12)) for text in PROMPTS))
    warm = [await answer(server, call(f"{text} And then?", max_tokens=12)) for text in PROMPTS]
    return {"cold": [reply.text for reply in cold], "warm": [reply.text for reply in warm]}


async def from_the_host_tier(server: EngineServer) -> Seen:
    first = await answer(server, call(f"Host. {LONG}", max_tokens=8))
    for number in range(16):
        await answer(server, call(f"{number} pushes. {LONG}", max_tokens=1))
    return {"first": asdict(first), "again": asdict(await answer(server, call(f"Host. {LONG}", max_tokens=8)))}


async def stuck(server: EngineServer) -> Seen:
    for pid in server.pids:
        os.kill(pid, signal.SIGSTOP)
    noticed = await _error(server.check_health(0.5))
    for pid in server.pids:
        os.kill(pid, signal.SIGCONT)
    return {"stopped": noticed, "freed": await _error(server.check_health(60.0))}


async def scheduler_killed(server: EngineServer) -> Seen:
    async def running() -> int:
        return int((await server.load())["running"])

    calls = [asyncio.create_task(_error(answer(server, call("Count.", max_tokens=3_000)))) for _ in range(3)]
    await becomes(3, running)
    os.kill(min(server.pids), signal.SIGKILL)
    ends = await asyncio.gather(*calls)
    seen = {
        "calls": ends,
        "health": await _error(server.check_health()),
        "late": await _error(answer(server, call("Anyone?"))),
    }
    await becomes([], lambda: alive(server.pids))
    return seen


async def shut_down(server: EngineServer) -> Seen:
    bystander = await asyncio.create_subprocess_exec("sleep", "600")
    server.shutdown()
    server.shutdown()
    spared = await alive([bystander.pid]) == [bystander.pid]
    bystander.kill()
    await bystander.wait()
    return {"bystander_lives": spared, "left": _children()}


def without_weights(options: EngineOptions) -> Seen:
    with tempfile.TemporaryDirectory() as folder:
        broken = Path(folder) / "broken"
        shutil.copytree(options.model, broken)
        (broken / "model.safetensors").write_bytes(b"no weights")
        try:
            EngineServer(replace(options, model=str(broken)))
        except PbkvError as error:
            return {"error": f"{type(error).__name__}: {error}", "left": _children()}
    return {"error": None}


async def _error(work: Any) -> str | None:
    try:
        await work
    except PbkvError as error:
        return f"{type(error).__name__}: {error}"
    return None


def _children() -> list[str]:
    """This process's children, but for Python's own resource tracker, which stays until the process ends."""
    lines = [" ".join(child.cmdline()) for child in psutil.Process().children(recursive=True)]
    return [line for line in lines if "resource_tracker" not in line]


async def main(options: EngineOptions) -> Seen:
    native = replace(options, write_policy="write_back", extra={"attention_backend": "torch_native"})
    kept = signal.getsignal(signal.SIGTERM)
    server = EngineServer(native, replica="fragile")
    seen: Seen = {"compared": await compared(server), "host": await from_the_host_tier(server)}
    seen["sigterm_is_ours"] = signal.getsignal(signal.SIGTERM) is kept
    seen["second"] = await _error(asyncio.to_thread(EngineServer, native))
    seen |= {"stuck": await stuck(server), "killed": await scheduler_killed(server), "shut": await shut_down(server)}
    return seen | {"broken": await asyncio.to_thread(without_weights, options)}


if __name__ == "__main__":
    found = asyncio.run(main(EngineOptions(**json.loads(sys.argv[1]))))
    Path(sys.argv[2]).write_text(json.dumps(found))

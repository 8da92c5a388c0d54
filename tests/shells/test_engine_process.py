"""A second real engine, run with SGLang's own attention and write_back, compared with the first and then broken."""

import asyncio
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from pbkv_ray.config import EngineOptions
from pbkv_ray.core.calls import Reply
from pbkv_ray.engine.server import EngineServer
from pbkv_ray.errors import EngineError
from tests.shells.engine_kit import alive, answer, becomes, call

pytestmark = pytest.mark.engine

PROMPTS = [f"Report {number}. " + "The pump was replaced and the pressure rose. " * (4 * number) for number in range(9)]


@pytest.fixture(scope="module")
def fragile(engine_options: EngineOptions) -> Iterator[EngineServer]:
    """An engine that the tests below may break; they run in the order of this file."""
    native = replace(engine_options, write_policy="write_back", extra={"attention_backend": "torch_native"})
    server = EngineServer(native, replica="fragile")
    yield server
    server.shutdown()


async def test_both_attentions_and_both_write_policies_give_the_same_tokens(
    engine: EngineServer, fragile: EngineServer
) -> None:
    """Cold in one batch, then with longer prompts whose beginnings are cached; greedy, float32."""
    told: dict[str, list[str]] = {}
    for server in (engine, fragile):
        cold = await asyncio.gather(*(answer(server, call(text, max_tokens=12)) for text in PROMPTS))
        warm = [await answer(server, call(f"{text} And then?", max_tokens=12)) for text in PROMPTS]
        assert all(reply.device_cached_tokens > 0 for reply in warm)
        told[server.replica] = [reply.text for reply in (*cold, *warm)]
    assert told["tests"] == told["fragile"]


async def test_write_back_serves_from_the_host_tier(fragile: EngineServer) -> None:
    text = "Host. " + "The committee met on Tuesday and wrote down what had been said. " * 40
    first = await answer(fragile, call(text, max_tokens=8))
    for number in range(16):
        await answer(fragile, call(f"{number} pushes. {text}", max_tokens=1))
    again = await answer(fragile, call(text, max_tokens=8))
    assert again.host_cached_tokens > 0
    assert again.text == first.text


async def test_a_stuck_scheduler_is_noticed_in_time_and_a_freed_one_is_healthy(fragile: EngineServer) -> None:
    for pid in fragile.pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        with pytest.raises(EngineError, match=r"gave no sign of life in 0\.5 s"):
            await fragile.check_health(0.5)
    finally:
        for pid in fragile.pids:
            os.kill(pid, signal.SIGCONT)
    await fragile.check_health(60.0)


async def test_a_dead_scheduler_fails_its_calls_and_the_health_check(fragile: EngineServer) -> None:
    running = [asyncio.create_task(answer(fragile, call("Count.", max_tokens=3_000))) for _ in range(3)]
    await becomes(3, lambda: _running(fragile))
    os.kill(min(fragile.pids), signal.SIGKILL)
    ends: list[Reply | BaseException] = await asyncio.gather(*running, return_exceptions=True)
    assert [type(end) for end in ends] == [EngineError] * 3
    assert "ended with code -9" in str(ends[0])
    with pytest.raises(EngineError, match="the engine of replica fragile is dead"):
        await fragile.check_health()
    with pytest.raises(EngineError, match="the engine of replica fragile is dead"):
        await answer(fragile, call("Anyone?"))
    await becomes([], lambda: alive(fragile.pids))


async def test_shutdown_after_death_is_safe_and_spares_other_children(fragile: EngineServer) -> None:
    bystander = await asyncio.create_subprocess_exec("sleep", "600")
    try:
        fragile.shutdown()
        fragile.shutdown()
        assert await alive([bystander.pid]) == [bystander.pid]
    finally:
        bystander.kill()
        await bystander.wait()


def test_an_engine_that_cannot_start_says_so_and_leaves_nothing(
    engine_options: EngineOptions, tiny_model: Path, tmp_path: Path
) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(tiny_model, broken)
    (broken / "model.safetensors").write_bytes(b"no weights")
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    with pytest.raises(EngineError, match="the SGLang engine did not start"):
        EngineServer(replace(engine_options, model=str(broken)))
    left = {child.pid for child in psutil.Process().children(recursive=True)} - before
    names = [" ".join(psutil.Process(pid).cmdline()) for pid in left]
    assert [name for name in names if "resource_tracker" not in name] == []


async def test_a_parent_killed_while_its_engine_starts_leaves_no_orphan(engine_options: EngineOptions) -> None:
    program = (
        "from pbkv_ray.config import EngineOptions; from pbkv_ray.engine.server import EngineServer\n"
        f"if __name__ == '__main__': EngineServer(EngineOptions(model={engine_options.model!r}))"
    )
    parent = await asyncio.create_subprocess_exec(sys.executable, "-c", program, stderr=asyncio.subprocess.DEVNULL)

    async def spawned() -> list[int]:
        children = psutil.Process(parent.pid).children(recursive=True)
        return [child.pid for child in children if "spawn_main" in " ".join(child.cmdline())]

    async def any_spawned() -> bool:
        return bool(await spawned())

    await becomes(True, any_spawned, seconds=120)
    pids = await spawned()
    parent.kill()
    await parent.wait()
    await becomes([], lambda: alive(pids))


async def _running(server: EngineServer) -> int:
    return int((await server.load())["running"])

"""An engine with SGLang's own attention and write_back, in another process: compared with ours, then broken."""

import asyncio
import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil
import pytest

from pbkv_ray.config import EngineOptions
from pbkv_ray.engine.server import EngineServer
from tests.shells.engine_kit import PROMPTS, alive, answer, becomes, call

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def seen(engine_options: EngineOptions, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the program in fragile_engine.py saw."""
    told = tmp_path_factory.mktemp("fragile") / "seen.json"
    root = Path(__file__).parents[2]
    program = [sys.executable, "-m", "tests.shells.fragile_engine", json.dumps(asdict(engine_options)), str(told)]
    done = subprocess.run(program, cwd=root, capture_output=True, text=True, timeout=900, check=False)
    assert told.exists(), done.stderr[-4_000:]
    found: dict[str, Any] = json.loads(told.read_text())
    return found


async def test_both_attentions_and_both_write_policies_give_the_same_tokens(
    engine: EngineServer, seen: dict[str, Any]
) -> None:
    """Cold in one batch, then longer prompts whose beginnings are cached; greedy, float32."""
    cold = await asyncio.gather(*(answer(engine, call(text, max_tokens=12)) for text in PROMPTS))
    warm = [await answer(engine, call(f"{text} And then?", max_tokens=12)) for text in PROMPTS]
    assert all(reply.device_cached_tokens > 0 for reply in warm)
    assert seen["compared"] == {"cold": [reply.text for reply in cold], "warm": [reply.text for reply in warm]}


def test_write_back_serves_from_the_host_tier(seen: dict[str, Any]) -> None:
    first, again = seen["host"]["first"], seen["host"]["again"]
    assert again["host_cached_tokens"] > 0
    assert again["host_cached_tokens"] + again["device_cached_tokens"] == again["prompt_tokens"] - 1
    assert again["text"] == first["text"]


def test_the_process_keeps_its_signals(seen: dict[str, Any]) -> None:
    """A scheduler that fails sends SIGQUIT, too: that this program told anything after `broken` is the other half."""
    assert seen["sigterm_is_ours"]


def test_a_process_has_one_engine(seen: dict[str, Any]) -> None:
    assert seen["second"] == (
        "EngineError: this process has an SGLang engine; shut it down first, or use another process"
    )


def test_a_stuck_scheduler_is_noticed_in_time_and_a_freed_one_is_healthy(seen: dict[str, Any]) -> None:
    assert seen["stuck"] == {
        "stopped": "EngineError: the scheduler gave no sign of life in 0.5 s",
        "freed": None,
    }


def test_a_dead_scheduler_fails_its_calls_and_the_health_check(seen: dict[str, Any]) -> None:
    killed = seen["killed"]
    assert len(killed["calls"]) == 3
    for told in killed["calls"]:
        assert told.startswith("EngineLostError: SGLang ended the request: the engine died: scheduler_0 (pid ")
        assert told.endswith("ended with code -9")
    for told in (killed["health"], killed["late"]):
        assert told.startswith("EngineLostError: the engine of replica fragile is dead: scheduler_0")


def test_shutdown_leaves_nothing_and_spares_other_children(seen: dict[str, Any]) -> None:
    assert seen["shut"] == {"bystander_lives": True, "left": []}


def test_an_engine_that_cannot_start_says_so_and_leaves_nothing(seen: dict[str, Any]) -> None:
    assert seen["broken"]["error"].startswith("EngineError: the SGLang engine did not start: ")
    assert "Duplicated timeseries" not in seen["broken"]["error"]
    assert seen["broken"]["left"] == []


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

    await becomes(True, any_spawned, seconds=180)
    pids = await spawned()
    parent.kill()
    await parent.wait()
    await becomes([], lambda: alive(pids))

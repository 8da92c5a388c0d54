"""Engines come and go by the load, and no run notices: real engines, real autoscaling."""

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from pbkv_ray.control.client import ControllerClient
from tests.e2e.load import PATIENCE_S, Load, served

pytestmark = [pytest.mark.ray, pytest.mark.engine, pytest.mark.soak]

APP = f"pbkv-scale-{os.getpid()}"


@pytest.fixture(scope="module")
def url(ray_cluster: None, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    database = f"sqlite+aiosqlite:///{tmp_path_factory.mktemp('scale') / 'runs.sqlite'}"
    scaling = {
        "engine_replicas": 1,
        "max_engine_replicas": 2,
        "scale_at_queued_tokens": 256,
        "scale_up_after_s": 1.0,
        "scale_down_after_s": 20.0,
        "max_running_requests": 2,
    }
    with served(APP, tiny_model, database, **scaling) as url:
        yield url


async def credited() -> int:
    return len(await ControllerClient(APP, timeout_s=30.0).replicas())


async def under_load_until(url: str, engines: int, runs: int) -> dict[str, int]:
    """{status: runs}. One load after the other until the controller knows so many engines, then one more."""
    found: dict[str, int] = {}
    number, enough = 0, False
    async with asyncio.timeout(PATIENCE_S):
        while not enough:
            enough = await credited() == engines
            load = Load(url, count=runs)
            await load.submit(f"for {engines} engines, {number}")
            number += 1
            for run in await load.ended():
                found[run["status"]] = found.get(run["status"], 0) + 1
    return found


async def replicas_of(url: str) -> set[str]:
    load = Load(url, count=6)
    await load.submit("who serves")
    assert {run["status"] for run in await load.ended()} == {"success"}
    return {call["replica"] for call in await load.calls()}


async def test_an_engine_joins_under_load_and_leaves_under_a_lighter_one(url: str):
    grown = await under_load_until(url, 2, runs=16)
    assert set(grown) == {"success"}
    served = await replicas_of(url)
    assert len(served) == 2, "the new engine gets runs"
    shrunk = await under_load_until(url, 1, runs=1)
    assert set(shrunk) == {"success"}
    left = await replicas_of(url)
    assert len(left) == 1 and left < served, "its runs got new homes"
    assert await Load(url).get("/v1/runs?status=running&limit=100") == []
    assert await Load(url).get("/v1/runs?status=pending&limit=100") == []

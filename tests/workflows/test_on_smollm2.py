"""The samples on the default model: the input decides the way, and together they take every edge of their graphs."""

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from pbkv_ray.config import EngineOptions
from pbkv_ray.engine.models import DEFAULT, DEFAULT_FOLDER, cache_dir
from pbkv_ray.engine.server import EngineServer
from pbkv_ray.graph.client import LLM
from pbkv_ray.graph.context import RunContext, running
from tests.workflows.fakes import Walk, all_edges, walk
from workflows.registry import REGISTRY
from workflows.tools.sandbox import why_forbidden

pytestmark = [
    pytest.mark.engine,
    pytest.mark.own_engine,
    pytest.mark.skipif(
        not (cache_dir() / "models" / DEFAULT_FOLDER).is_dir(), reason="make setup has not prepared the default model"
    ),
    pytest.mark.skipif(why_forbidden() is not None, reason=f"no sandbox for swe: {why_forbidden()}"),
]
AT_ONCE = 8


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def smollm2() -> AsyncIterator[EngineServer]:
    server = await asyncio.to_thread(EngineServer, EngineOptions(model=DEFAULT, max_running_requests=AT_ONCE))
    yield server
    await asyncio.to_thread(server.shutdown)


async def walk_samples(server: EngineServer, name: str, numbers: range | None = None) -> list[Walk]:
    spec = REGISTRY[name]
    samples = spec.samples()
    slots = asyncio.Semaphore(AT_ONCE)

    async def one(number: int) -> Walk:
        async with slots:
            with running(RunContext(f"{name}-{number}", name)):
                return await walk(spec, LLM(server, lambda event: None), samples[number])

    return await asyncio.gather(*map(one, numbers or range(len(samples))))


@pytest.mark.parametrize("name", ["hover", "swe"])
async def test_the_input_decides_the_way_and_the_samples_take_every_edge(smollm2: EngineServer, name: str) -> None:
    runs = await walk_samples(smollm2, name)
    paths = [run.path for run in runs]
    assert len(set(paths)) >= 3, paths
    assert len(set(paths[:3])) >= 2, "the first three, which the demo runs, differ"
    assert set().union(*(run.edges for run in runs)) == all_edges(REGISTRY[name], None)
    again = await walk_samples(smollm2, name, range(3))
    assert [run.path for run in again] == paths[:3], "the same input takes the same way"


async def test_finance_always_takes_its_one_way_and_answers(smollm2: EngineServer) -> None:
    runs = await walk_samples(smollm2, "finance", range(3))
    assert {run.path for run in runs} == {("extract", "compute", "calculate", "check", "report")}
    assert all(run.state["answer"] for run in runs)

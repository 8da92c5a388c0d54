"""Shared fixtures. What is slow to start is started once a session."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from pbkv_ray.cli.local import prepare_environment
from pbkv_ray.config import EngineOptions
from pbkv_ray.engine.models import DEFAULT_FOLDER, cache_dir
from pbkv_ray.engine.models import tiny_model as make_tiny_model
from pbkv_ray.engine.server import EngineServer

prepare_environment()  # before any module imports ray
os.environ.setdefault("OMP_NUM_THREADS", "1")  # several engines spin against each other on two cores


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Async tests of the session's engine share one event loop, the one that the engine belongs to."""
    for item in items:
        if item.get_closest_marker("engine") and pytest_asyncio.is_async_test(item):
            item.add_marker(pytest.mark.asyncio(loop_scope="session"), append=False)


@pytest.fixture(scope="session")
def tiny_model() -> Path:
    """The folder of the tiny random-weight model; made on first use, kept in the user's cache."""
    models = cache_dir() / "models"
    words = DEFAULT_FOLDER if (models / DEFAULT_FOLDER / "config.json").is_file() else "bytes"
    return make_tiny_model(models / f"tiny-random-weight-{words}")


@pytest.fixture(scope="session")
def engine_options(tiny_model: Path) -> EngineOptions:
    """Options of a small engine; vary them with `dataclasses.replace`."""
    return EngineOptions(model=str(tiny_model), device_pool_tokens=8_192, context_length=4_096)


@pytest.fixture(scope="session")
def engine(engine_options: EngineOptions) -> Iterator[EngineServer]:
    """One real engine with the tiny random-weight model for the whole session: mark its tests `engine`.

    Do not kill or flush it; a test that must breaks an engine of its own.
    """
    server = EngineServer(engine_options, replica="tests")
    yield server
    server.shutdown()


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    """A Ray cluster of this process on loopback; four logical CPUs, whatever the machine has."""
    import ray

    from deployments.app import start_ray

    start_ray(4)
    yield
    ray.shutdown()

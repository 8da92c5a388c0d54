"""The databases that store and runner tests run on: SQLite always, PostgreSQL when PBKV_TEST_POSTGRES_URL is set.

Each test gets an empty database of its own: a new file, or a new database on the server.
"""

import os
import uuid
from collections.abc import AsyncIterator
from pathlib import Path

import psycopg
import pytest
from sqlalchemy import make_url

SERVER = os.environ.get("PBKV_TEST_POSTGRES_URL")

BACKENDS = [
    "sqlite",
    pytest.param(
        "postgres",
        marks=[pytest.mark.postgres, pytest.mark.skipif(not SERVER, reason="PBKV_TEST_POSTGRES_URL is not set")],
    ),
]


async def fresh_database(backend: str, folder: Path) -> AsyncIterator[str]:
    """The URL of a new empty database; it is dropped afterwards."""
    if backend == "sqlite":
        yield f"sqlite:///{folder / 'pbkv.db'}"
        return
    assert SERVER is not None
    name = f"pbkv_test_{uuid.uuid4().hex[:12]}"
    server_url = make_url(SERVER).set(drivername="postgresql")
    server = await psycopg.AsyncConnection.connect(server_url.render_as_string(False), autocommit=True)
    async with server:
        await server.execute(f'CREATE DATABASE "{name}"')
        try:
            yield server_url.set(database=name).render_as_string(hide_password=False)
        finally:
            await server.execute(f'DROP DATABASE "{name}" WITH (FORCE)')

"""LangGraph's own checkpoint savers, on the same database as the store."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiosqlite
from langgraph.checkpoint.base import BaseCheckpointSaver
from langgraph.checkpoint.postgres.aio import AsyncPostgresSaver
from langgraph.checkpoint.sqlite.aio import AsyncSqliteSaver
from psycopg.rows import dict_row
from psycopg_pool import AsyncConnectionPool
from sqlalchemy import make_url

from pbkv_ray.store.database import BUSY_TIMEOUT_MS, async_url


@asynccontextmanager
async def open_checkpointer(store_url: str, *, pool_size: int = 8) -> AsyncIterator[BaseCheckpointSaver[Any]]:
    """The saver that belongs to a store's URL, its tables made.

    On SQLite the checkpoints lie in a file of their own beside the store's, because a file has one writer at a time
    and both write often. ConfigError for a URL that the store would refuse.
    """
    url = make_url(async_url(store_url))
    if url.get_backend_name() == "sqlite":
        store = Path(str(url.database))
        store.parent.mkdir(parents=True, exist_ok=True)
        beside = store.with_name(f"{store.stem}-checkpoints{store.suffix}")
        async with aiosqlite.connect(beside, timeout=BUSY_TIMEOUT_MS / 1000) as connection:
            saver = AsyncSqliteSaver(connection)
            await saver.setup()
            yield saver
        return
    conninfo = url.set(drivername="postgresql").render_as_string(hide_password=False)
    options: dict[str, Any] = {"autocommit": True, "prepare_threshold": 0, "row_factory": dict_row}
    async with AsyncConnectionPool(conninfo, min_size=1, max_size=pool_size, kwargs=options, open=False) as pool:
        postgres = AsyncPostgresSaver(pool)  # type: ignore[arg-type]
        await postgres.setup()
        yield postgres

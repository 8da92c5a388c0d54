"""One SQLAlchemy engine on SQLite or PostgreSQL, with the two kinds of access the store needs: read and write."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import event, insert, make_url, select, text, update
from sqlalchemy.exc import DBAPIError, InterfaceError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

from pbkv_ray.errors import ConfigError, StoreError
from pbkv_ray.store import schema

BUSY_TIMEOUT_MS = 30_000
AWAY = (OperationalError, InterfaceError, PoolTimeoutError, OSError)


def async_url(url: str) -> str:
    """The URL with an async driver: sqlite+aiosqlite or postgresql+psycopg. ConfigError for anything else."""
    try:
        parsed = make_url(url)
    except Exception as error:
        raise ConfigError(f"store URL {url!r} cannot be read; give sqlite:///FILE or postgresql://...") from error
    drivers = {"sqlite": "sqlite+aiosqlite", "postgresql": "postgresql+psycopg", "postgres": "postgresql+psycopg"}
    name = parsed.drivername.split("+")[0]
    if name not in drivers:
        raise ConfigError(f"store URL names {name!r}; known are sqlite:///FILE and postgresql://USER@HOST/NAME")
    return parsed.set(drivername=drivers[name]).render_as_string(hide_password=False)


class Database:
    """The connections. `read` sees committed rows, each statement for itself; `write` is one transaction.
    Both raise StoreError when the database does not answer.

    SQLite has one writer. Inside a process writers wait on an asyncio lock, because SQLite's own busy handler
    sleeps up to 100 ms between tries; between processes BEGIN IMMEDIATE and `busy_timeout` do, because a
    transaction that reads first and writes later could not wait (SQLITE_BUSY_SNAPSHOT).
    """

    def __init__(self, url: str, *, pool_size: int = 8) -> None:
        self.url = make_url(async_url(url))
        self.is_sqlite = self.url.get_backend_name() == "sqlite"
        if self.is_sqlite and self.url.database in (None, "", ":memory:"):
            raise ConfigError("an in-memory SQLite store forgets its runs; give sqlite:///FILE")
        self._engine: AsyncEngine = create_async_engine(
            self.url, pool_size=pool_size, max_overflow=0, pool_pre_ping=not self.is_sqlite
        )
        self._writer = asyncio.Lock()
        if self.is_sqlite:
            Path(str(self.url.database)).parent.mkdir(parents=True, exist_ok=True)
            event.listen(self._engine.sync_engine, "connect", _prepare_sqlite)

    async def create_tables(self) -> None:
        """Idempotent, also when several processes start at once. ConfigError for tables of a version
        that nothing upgrades."""
        for last_try in (False, True):
            try:
                async with self.write() as connection:
                    await connection.run_sync(schema.metadata.create_all)
                    await self._check_version(connection)
                return
            except (DBAPIError, StoreError) as error:  # two processes created the same table
                if last_try:
                    raise StoreError(f"store {self.shown} cannot create its tables: {error}") from error

    async def _check_version(self, connection: AsyncConnection) -> None:
        found = await connection.scalar(select(schema.meta.c.value).where(schema.meta.c.name == "version"))
        if found is None:
            await connection.execute(insert(schema.meta).values(name="version", value=str(schema.VERSION)))
            return
        while found in schema.UPGRADES:
            for statement in schema.UPGRADES[found]:
                await connection.execute(text(statement))
            found = str(int(found) + 1)
            await connection.execute(update(schema.meta).where(schema.meta.c.name == "version").values(value=found))
        if found != str(schema.VERSION):
            raise ConfigError(
                f"store {self.shown} has tables of version {found}; this program reads version {schema.VERSION}. "
                "Use the program that made them, or another store"
            )

    @property
    def shown(self) -> str:
        """The URL for messages and logs, without its password."""
        return self.url.render_as_string(hide_password=True)

    @asynccontextmanager
    async def read(self) -> AsyncIterator[AsyncConnection]:
        with self._translated():
            async with self._engine.connect() as connection:
                # SQLite's connections are in autocommit as they are (_prepare_sqlite).
                if not self.is_sqlite:
                    connection = await connection.execution_options(isolation_level="AUTOCOMMIT")
                yield connection

    @asynccontextmanager
    async def write(self) -> AsyncIterator[AsyncConnection]:
        with self._translated():
            if not self.is_sqlite:
                async with self._engine.begin() as connection:
                    yield connection
                return
            async with self._writer, self._engine.connect() as connection:
                await connection.exec_driver_sql("BEGIN IMMEDIATE")
                try:
                    yield connection
                except BaseException:
                    await connection.rollback()
                    raise
                await connection.commit()

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except AWAY as error:
            reason = str(getattr(error, "orig", None) or error).partition("\n")[0]
            raise StoreError(f"store {self.shown} does not answer ({reason:.200}); try again") from error

    async def close(self) -> None:
        await self._engine.dispose()


def _prepare_sqlite(connection: Any, _record: Any) -> None:
    connection.isolation_level = None  # we say BEGIN ourselves
    cursor = connection.cursor()
    cursor.execute(f"PRAGMA busy_timeout = {BUSY_TIMEOUT_MS}")
    cursor.execute("PRAGMA journal_mode = WAL")
    cursor.close()

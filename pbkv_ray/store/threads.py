"""Threads: the durable conversations that runs belong to."""

from collections.abc import Iterable
from typing import Any

from sqlalchemy import ColumnElement, delete, exists, insert, select, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncConnection

from pbkv_ray.errors import ConflictError, InputError, NotFoundError
from pbkv_ray.store.database import Database
from pbkv_ray.store.rows import INFLIGHT, Json, ThreadRow, ThreadStatus
from pbkv_ray.store.schema import runs, threads

EMPTY_STATE = '{"values": null, "interrupts": {}}'
MAX_PAGE = 1_000


def page(limit: int, offset: int) -> tuple[int, int]:
    """InputError unless 1 <= limit <= MAX_PAGE and offset >= 0: no query returns more rows than that."""
    if not 1 <= limit <= MAX_PAGE or offset < 0:
        raise InputError(f"limit {limit} and offset {offset}: limit must be 1..{MAX_PAGE}, offset 0 or more")
    return limit, offset


def matches(column: Any, wanted: Json) -> Iterable[ColumnElement[bool]]:
    """Conditions for a JSON column whose top-level keys have the wanted scalar values."""
    for key, value in wanted.items():
        if isinstance(value, bool):
            yield column[key].as_boolean() == value
        elif isinstance(value, str):
            yield column[key].as_string() == value
        elif isinstance(value, int):
            yield column[key].as_integer() == value
        else:
            raise InputError(f"metadata filter {key!r}: {value!r}; only text, whole numbers and booleans can be sought")


class Threads:
    def __init__(self, database: Database) -> None:
        self._db = database

    async def create(self, thread_id: str, metadata: Json, now: float, *, ephemeral: bool = False) -> ThreadRow:
        """ConflictError when the thread exists."""
        try:
            async with self._db.write() as connection:
                return await add_thread(connection, thread_id, metadata, now, ephemeral=ephemeral)
        except IntegrityError as error:
            raise ConflictError(f"thread {thread_id!r} exists; use it, or leave the id to the server") from error

    async def get(self, thread_id: str) -> ThreadRow:
        async with self._db.read() as connection:
            return await get_thread(connection, thread_id)

    async def update(self, thread_id: str, metadata: Json, now: float) -> ThreadRow:
        """Merges `metadata` over what is there, key by key."""
        async with self._db.write() as connection:
            await lock_thread(connection, thread_id, now)
            found = await get_thread(connection, thread_id)
            statement = update(threads).where(threads.c.thread_id == thread_id)
            await connection.execute(statement.values(metadata={**found.metadata, **metadata}))
            return await get_thread(connection, thread_id)

    async def set_state(self, thread_id: str, state: str, status: ThreadStatus, now: float) -> None:
        """What someone set by hand. ConflictError when a run of the thread is in flight."""
        async with self._db.write() as connection:
            await lock_thread(connection, thread_id, now)
            busy = await connection.scalar(select(_inflight(thread_id)))
            if busy:
                raise ConflictError(f"thread {thread_id!r} is busy; wait for its run or cancel it")
            await connection.execute(
                update(threads).where(threads.c.thread_id == thread_id).values(state=state, status=status)
            )

    async def search(self, metadata: Json, status: str | None, limit: int, offset: int) -> list[ThreadRow]:
        """Newest update first. Threads of stateless runs are not shown."""
        limit, offset = page(limit, offset)
        statement = select(threads).where(threads.c.ephemeral.is_(False), *matches(threads.c.metadata, metadata))
        if status is not None:
            statement = statement.where(threads.c.status == status)
        statement = statement.order_by(threads.c.updated_at.desc(), threads.c.thread_id).limit(limit).offset(offset)
        async with self._db.read() as connection:
            return [ThreadRow(**row) for row in (await connection.execute(statement)).mappings()]

    async def delete(self, thread_id: str) -> None:
        """The thread alone (`Store.delete_thread` takes its runs too)."""
        async with self._db.write() as connection:
            await connection.execute(delete(threads).where(threads.c.thread_id == thread_id))

    async def stale(self, before: float, limit: int) -> list[str]:
        """Threads that nothing touched since and that hold no runs any more."""
        has_runs = exists().where(runs.c.thread_id == threads.c.thread_id)
        statement = select(threads.c.thread_id).where(threads.c.updated_at < before, ~has_runs).limit(limit)
        async with self._db.read() as connection:
            return list(await connection.scalars(statement))


def _inflight(thread_id: str) -> ColumnElement[bool]:
    return exists().where(runs.c.thread_id == thread_id, runs.c.status.in_(INFLIGHT))


async def add_thread(
    connection: AsyncConnection, thread_id: str, metadata: Json, now: float, *, ephemeral: bool
) -> ThreadRow:
    row = ThreadRow(thread_id, None, "idle", metadata, EMPTY_STATE, ephemeral, now, now)
    values = {name: getattr(row, name) for name in ThreadRow.__slots__}
    await connection.execute(insert(threads).values(**values))
    return row


async def get_thread(connection: AsyncConnection, thread_id: str) -> ThreadRow:
    row = (await connection.execute(select(threads).where(threads.c.thread_id == thread_id))).mappings().first()
    if row is None:
        raise NotFoundError(f"thread {thread_id!r} does not exist; create it first")
    return ThreadRow(**row)


async def lock_thread(connection: AsyncConnection, thread_id: str, now: float) -> None:
    """Holds the thread's row until the transaction ends, so that what it decides about the thread stays true."""
    touched = await connection.execute(update(threads).where(threads.c.thread_id == thread_id).values(updated_at=now))
    if touched.rowcount == 0:
        raise NotFoundError(f"thread {thread_id!r} does not exist; create it first")

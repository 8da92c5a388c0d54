"""The events of runs, kept so that a client can come back for them, and the LLM calls they made.

Both are written in batches by the runner that owns the runs. A batch of a run whose owner changed is refused: the
condition stands in the same transaction as the insert, so two runners never interleave their events.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from sqlalchemy import delete, func, insert, select, true, update
from sqlalchemy.ext.asyncio import AsyncConnection

from pbkv_ray.store.database import Database
from pbkv_ray.store.rows import CallRow, EventRow
from pbkv_ray.store.schema import call_reports, calls, run_events, runs


@dataclass(slots=True)
class Batch:
    """What one run has to write: events (name, JSON text) in order, and calls."""

    run_id: str
    owner: str
    attempt: int
    events: list[tuple[str, str]] = field(default_factory=list)
    calls: list[CallRow] = field(default_factory=list)


class Events:
    """`max_events` bounds what is kept of one run; see `_trim` for what goes first."""

    def __init__(self, database: Database, max_events: int) -> None:
        self._db = database
        self._max_events = max_events

    async def append(self, batches: Sequence[Batch], now: float) -> tuple[set[str], int]:
        """Writes all batches in one transaction. Returns the runs that are not ours now, and the events dropped."""
        lost: set[str] = set()
        dropped = 0
        async with self._db.write() as connection:
            for batch in sorted(batches, key=lambda batch: batch.run_id):  # the order of all who lock several runs
                mine = (
                    update(runs)
                    .where(
                        runs.c.run_id == batch.run_id,
                        runs.c.owner == batch.owner,
                        runs.c.attempt == batch.attempt,
                        runs.c.status == "running",
                    )
                    .values(last_seq=runs.c.last_seq + len(batch.events), updated_at=now)
                    .returning(runs.c.last_seq, runs.c.events_dropped)
                )
                row = (await connection.execute(mine)).first()
                if row is None:
                    lost.add(batch.run_id)
                    continue
                first = row.last_seq - len(batch.events) + 1
                await insert_events(connection, batch.run_id, first, batch.events)
                if batch.calls:
                    await _insert_calls(connection, batch.calls)
                if row.last_seq - row.events_dropped > self._max_events:
                    dropped += await self._trim(connection, batch.run_id, row.last_seq - row.events_dropped)
        return lost, dropped

    async def _trim(self, connection: AsyncConnection, run_id: str, kept: int) -> int:
        """Drops a tenth more than needed, so that a full run is not trimmed at every batch.

        Oldest `values` first: each is the whole state, so the newer ones say all they said. Then the oldest of the
        rest. Never the newest `values`, which is the state, nor the first event, which names the run.
        """
        excess = kept - self._max_events + self._max_events // 10
        dropped = 0
        is_values = run_events.c.event == "values"
        state = select(func.max(run_events.c.seq)).where(run_events.c.run_id == run_id, is_values).scalar_subquery()
        may_go = run_events.c.seq.not_in((1, func.coalesce(state, 1)))
        for condition in (is_values, true()):
            oldest = (
                select(run_events.c.seq)
                .where(run_events.c.run_id == run_id, may_go, condition)
                .order_by(run_events.c.seq)
                .limit(excess - dropped)
            )
            gone = await connection.execute(
                delete(run_events).where(run_events.c.run_id == run_id, run_events.c.seq.in_(oldest))
            )
            dropped += gone.rowcount
            if dropped >= excess:
                break
        counted = update(runs).where(runs.c.run_id == run_id)
        await connection.execute(counted.values(events_dropped=runs.c.events_dropped + dropped))
        return dropped

    async def after(self, run_id: str, seq: int, limit: int = 256) -> list[EventRow]:
        statement = (
            select(run_events)
            .where(run_events.c.run_id == run_id, run_events.c.seq > seq)
            .order_by(run_events.c.seq)
            .limit(limit)
        )
        async with self._db.read() as connection:
            return [EventRow(**row) for row in (await connection.execute(statement)).mappings()]

    async def calls_of(self, run_id: str, limit: int, *, reports: bool = False) -> list[CallRow]:
        """In the order in which they finished."""
        columns: list[Any] = [column for column in calls.c if column.name != "position"]
        statement = select(*columns)
        if reports:
            same = (call_reports.c.run_id == calls.c.run_id) & (call_reports.c.call_id == calls.c.call_id)
            statement = select(*columns, call_reports.c.data.label("report")).outerjoin(call_reports, same)
        statement = statement.where(calls.c.run_id == run_id).order_by(calls.c.position).limit(limit)
        async with self._db.read() as connection:
            return [CallRow(**row) for row in (await connection.execute(statement)).mappings()]

    async def count(self, run_id: str) -> int:
        statement = select(func.count()).select_from(run_events).where(run_events.c.run_id == run_id)
        async with self._db.read() as connection:
            return int(await connection.scalar(statement) or 0)


async def _insert_calls(connection: AsyncConnection, rows: Sequence[CallRow]) -> None:
    values = [asdict(row) for row in rows]
    reports = [(value["run_id"], value["call_id"], value.pop("report")) for value in values]
    await connection.execute(insert(calls), values)
    told = [{"run_id": run, "call_id": call, "data": data} for run, call, data in reports if data is not None]
    if told:
        await connection.execute(insert(call_reports), told)


async def insert_events(
    connection: AsyncConnection, run_id: str, first_seq: int, events: Sequence[tuple[str, str]]
) -> None:
    if events:
        rows = [
            {"run_id": run_id, "seq": first_seq + index, "event": event, "data": data}
            for index, (event, data) in enumerate(events)
        ]
        await connection.execute(insert(run_events), rows)

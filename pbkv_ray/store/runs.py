"""Runs: admitted, claimed by one runner at a time, renewed while they live, ended exactly once.

Life of a run: pending -> running -> success | error | timeout | interrupted. Every transition is one conditional
UPDATE (or one transaction around it), so that of two runners that try the same one wins and the other learns it.
A running run has an owner and a lease; whoever finds the lease expired may take it over, as the next attempt.
"""

from collections.abc import Sequence
from typing import Any

from sqlalchemy import ColumnElement, and_, case, delete, exists, func, insert, select, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncConnection

from pbkv_ray.errors import ConflictError, NotFoundError, UnavailableError
from pbkv_ray.store.database import Database
from pbkv_ray.store.events import insert_events
from pbkv_ray.store.rows import INFLIGHT, Admission, Ending, NewRun, RunRow, Stop
from pbkv_ray.store.schema import call_reports, calls, run_events, runs, threads
from pbkv_ray.store.threads import add_thread, lock_thread, page

CANDIDATES = 16  # runs looked at in one pass
# A head start lets a run overtake those that came just before it, never those that have waited longer: none starves.
_QUEUE = (runs.c.created_at - runs.c.head_start_s, runs.c.position)


class Runs:
    def __init__(self, database: Database) -> None:
        self._db = database

    # --- admission ---

    async def admit(self, new: NewRun, *, max_pending: int, now: float, make_thread: bool = False) -> Admission:
        """Stores the run as pending, and settles what its multitask strategy says about the thread's other runs.

        `make_thread` makes an ephemeral thread for it. ConflictError on a busy thread with "reject";
        UnavailableError when `max_pending` runs wait already; NotFoundError without the thread.
        """
        async with self._db.write() as connection:
            if make_thread:
                await add_thread(connection, new.thread_id, new.metadata, now, ephemeral=True)
            await lock_thread(connection, new.thread_id, now)
            others = await _select(connection, runs.c.thread_id == new.thread_id, runs.c.status.in_(INFLIGHT))
            if others and new.multitask == "reject":
                raise ConflictError(
                    f"thread {new.thread_id!r} is busy with run {others[0].run_id!r}; wait for it, cancel it, or "
                    'give multitask_strategy "enqueue", "interrupt" or "rollback"'
                )
            waiting = select(runs.c.run_id).where(runs.c.status == "pending").limit(max_pending).subquery()
            if await connection.scalar(select(func.count()).select_from(waiting)) == max_pending:
                raise UnavailableError(f"{max_pending} runs wait already, which is the most that may; try again later")
            stopping = others if new.multitask in ("interrupt", "rollback") else []
            if stopping:
                names = await _locked(connection, runs.c.run_id.in_([run.run_id for run in stopping]))
                asked = update(runs).where(runs.c.run_id.in_(names), runs.c.status.in_(INFLIGHT))
                asked = asked.values(stop_request=new.multitask, updated_at=now).returning(runs)
                stopping = [RunRow(**row) for row in (await connection.execute(asked)).mappings()]
            row = insert(runs).values(
                run_id=new.run_id,
                thread_id=new.thread_id,
                workflow=new.workflow,
                status="pending",
                multitask=new.multitask,
                metadata=new.metadata,
                request=new.request,
                head_start_s=new.head_start_s,
                attempt=0,
                created_at=now,
                updated_at=now,
            )
            admitted = (await connection.execute(row.returning(runs))).mappings().one()
            thread = update(threads).where(threads.c.thread_id == new.thread_id)
            await connection.execute(thread.values(status="busy", workflow=new.workflow))
            return Admission(RunRow(**admitted), tuple(sorted(stopping, key=lambda run: run.position)))

    # --- execution ---

    async def claimable(self) -> list[str]:
        """The first pending runs whose threads are free, CANDIDATES at most."""
        earlier = runs.alias()
        blocked = exists().where(
            earlier.c.thread_id == runs.c.thread_id,
            earlier.c.status.in_(INFLIGHT),
            earlier.c.position < runs.c.position,
        )
        candidates = (
            select(runs.c.run_id).where(runs.c.status == "pending", ~blocked).order_by(*_QUEUE).limit(CANDIDATES)
        )
        async with self._db.read() as connection:
            return list(await connection.scalars(candidates))

    async def claim(self, run_id: str, owner: str, *, lease_until: float, now: float) -> RunRow | None:
        """The run, now running and ours; None unless it is still pending and its thread free."""
        return await self._take(owner, lease_until, now, runs.c.run_id == run_id, runs.c.status == "pending")

    async def expired(self, now: float) -> list[RunRow]:
        """Running runs whose lease has expired: their runner crashed, stalled or lost the database."""
        async with self._db.read() as connection:
            return await _select(connection, runs.c.status == "running", runs.c.lease_until < now, limit=CANDIDATES)

    async def take_over(self, run: RunRow, owner: str, *, lease_until: float, now: float) -> RunRow | None:
        """The expired run, now ours and one attempt on. None when somebody was faster."""
        same = (runs.c.run_id == run.run_id, runs.c.status == "running", runs.c.attempt == run.attempt)
        return await self._take(owner, lease_until, now, *same, runs.c.lease_until < now)

    async def _take(self, owner: str, lease_until: float, now: float, *where: ColumnElement[bool]) -> RunRow | None:
        statement = (
            update(runs)
            .where(*where)
            .values(
                status="running",
                owner=owner,
                lease_until=lease_until,
                attempt=runs.c.attempt + 1,
                updated_at=now,
                started_at=func.coalesce(runs.c.started_at, now),
            )
            .returning(runs)
        )
        try:
            async with self._db.write() as connection:
                row = (await connection.execute(statement)).mappings().first()
        except IntegrityError:  # another run of the thread runs already (index one_running_run_a_thread)
            return None
        return None if row is None else RunRow(**row)

    async def set_base(self, run: RunRow, checkpoint_id: str | None) -> None:
        """Where the thread stood before the run's first attempt."""
        async with self._db.write() as connection:
            await connection.execute(_mine(run).values(base_checkpoint=checkpoint_id))

    async def renew(self, owner: str, run_ids: Sequence[str], *, lease_until: float, now: float) -> dict[str, int]:
        """Extends the leases of those of the runs that are still ours. Returns their run_id -> attempt."""
        if not run_ids:
            return {}
        statement = (
            update(runs)
            .where(runs.c.status == "running", runs.c.owner == owner, runs.c.run_id.in_(run_ids))
            .values(lease_until=lease_until)
            .returning(runs.c.run_id, runs.c.attempt)
        )
        async with self._db.write() as connection:
            await _locked(connection, runs.c.run_id.in_(run_ids))
            return {row.run_id: row.attempt for row in await connection.execute(statement)}

    async def stop_requests(self, owner: str) -> dict[str, Stop]:
        """What others asked of our running runs."""
        statement = select(runs.c.run_id, runs.c.stop_request).where(
            runs.c.status == "running", runs.c.owner == owner, runs.c.stop_request.is_not(None)
        )
        async with self._db.read() as connection:
            return {row.run_id: row.stop_request for row in await connection.execute(statement)}

    async def ask_stop(self, run_id: str, stop: Stop, now: float) -> None:
        async with self._db.write() as connection:
            asked = update(runs).where(runs.c.run_id == run_id, runs.c.status.in_(INFLIGHT))
            await connection.execute(asked.values(stop_request=stop, updated_at=now))

    async def release(self, run: RunRow, now: float, *, counted: bool) -> bool:
        """Gives a running run back to the queue; its attempt is forgotten unless `counted`."""
        back = {"status": "pending", "owner": None, "lease_until": None, "updated_at": now}
        async with self._db.write() as connection:
            given = await connection.execute(
                _mine(run).values(**back, attempt=run.attempt if counted else run.attempt - 1)
            )
            return given.rowcount == 1

    # --- ends ---

    async def end(self, run: RunRow, ending: Ending, now: float) -> bool:
        """Ends the run as it stands in `run` (status, owner, attempt); False when it has moved on meanwhile.

        Status, closing events, the thread's state and status: all or nothing.
        """
        async with self._db.write() as connection:
            await _touch_thread(connection, run.thread_id, now)
            statement = (
                _mine(run)
                .values(
                    status=ending.status,
                    owner=None,
                    lease_until=None,
                    stop_request=None,
                    output=ending.output,
                    error=ending.error,
                    message=ending.message,
                    last_seq=runs.c.last_seq + len(ending.events),
                    ended_at=now,
                    updated_at=now,
                )
                .returning(runs.c.last_seq)
            )
            last_seq = await connection.scalar(statement)
            if last_seq is None:
                return False
            await insert_events(connection, run.run_id, last_seq - len(ending.events) + 1, ending.events)
            await _settle_thread(connection, run.thread_id, ending.thread_status, ending.state)
            return True

    async def discard(self, run: RunRow, ending: Ending, now: float) -> bool:
        """Like `end`, but leaves nothing of the run: what a rollback does once its checkpoints are gone."""
        async with self._db.write() as connection:
            await _touch_thread(connection, run.thread_id, now)
            gone = await connection.execute(delete(runs).where(*_unchanged(run)))
            if gone.rowcount == 0:
                return False
            await _delete_details(connection, [run.run_id])
            await _settle_thread(connection, run.thread_id, ending.thread_status, ending.state)
            return True

    async def delete(self, run_id: str) -> None:
        """ConflictError when the run is in flight."""
        async with self._db.write() as connection:
            gone = await connection.execute(delete(runs).where(runs.c.run_id == run_id, runs.c.status.not_in(INFLIGHT)))
            if gone.rowcount == 0 and await _select(connection, runs.c.run_id == run_id):
                raise ConflictError(f"run {run_id!r} has not ended; cancel it first")
            await _delete_details(connection, [run_id])

    async def delete_ended(self, before: float, limit: int) -> list[str]:
        """Deletes the oldest ended runs, `limit` at most, with their events and calls; returns their ids."""
        async with self._db.write() as connection:
            oldest = select(runs.c.run_id).where(runs.c.ended_at < before).order_by(runs.c.ended_at).limit(limit)
            found = list(await connection.scalars(oldest))
            if found:
                await connection.execute(delete(runs).where(runs.c.run_id.in_(found)))
                await _delete_details(connection, found)
            return found

    async def delete_of_thread(self, thread_id: str, limit: int = 500) -> int:
        """ConflictError when one of them is in flight."""
        async with self._db.write() as connection:
            if await _select(connection, runs.c.thread_id == thread_id, runs.c.status.in_(INFLIGHT), limit=1):
                raise ConflictError(f"thread {thread_id!r} has a run in flight; cancel it first")
            found = list(
                await connection.scalars(select(runs.c.run_id).where(runs.c.thread_id == thread_id).limit(limit))
            )
            if found:
                await connection.execute(delete(runs).where(runs.c.run_id.in_(found)))
                await _delete_details(connection, found)
            return len(found)

    # --- queries ---

    async def find(self, run_id: str) -> RunRow | None:
        async with self._db.read() as connection:
            found = await _select(connection, runs.c.run_id == run_id)
        return found[0] if found else None

    async def get(self, run_id: str, thread_id: str | None = None) -> RunRow:
        found = await self.find(run_id)
        if found is None or thread_id not in (None, found.thread_id):
            where = "" if thread_id is None else f" in thread {thread_id!r}"
            raise NotFoundError(f"run {run_id!r} does not exist{where}; list the runs to see what does")
        return found

    async def list(self, thread_id: str | None, status: str | None, limit: int, offset: int) -> list[RunRow]:
        """Newest first."""
        limit, offset = page(limit, offset)
        statement = select(runs).order_by(runs.c.position.desc()).limit(limit).offset(offset)
        if thread_id is not None:
            statement = statement.where(runs.c.thread_id == thread_id)
        if status is not None:
            statement = statement.where(runs.c.status == status)
        async with self._db.read() as connection:
            return [RunRow(**row) for row in (await connection.execute(statement)).mappings()]

    async def queue(self, limit: int = 1_000) -> Sequence[str]:
        """The pending runs, first come first but for head starts, the first `limit` of them."""
        waiting = select(runs.c.run_id).where(runs.c.status == "pending").order_by(*_QUEUE).limit(limit)
        async with self._db.read() as connection:
            return list(await connection.scalars(waiting))

    async def counts(self) -> dict[str, int]:
        """Runs in flight by status."""
        statement = select(runs.c.status, func.count()).where(runs.c.status.in_(INFLIGHT)).group_by(runs.c.status)
        async with self._db.read() as connection:
            return {row[0]: row[1] for row in await connection.execute(statement)}


def _unchanged(run: RunRow) -> tuple[ColumnElement[bool], ...]:
    same = (runs.c.run_id == run.run_id, runs.c.status == run.status, runs.c.attempt == run.attempt)
    return (*same, runs.c.owner.is_(None) if run.owner is None else runs.c.owner == run.owner)


def _mine(run: RunRow) -> Any:
    return update(runs).where(and_(*_unchanged(run)))


async def _select(connection: AsyncConnection, *where: ColumnElement[bool], limit: int = 1_000) -> list[RunRow]:
    rows = await connection.execute(select(runs).where(*where).order_by(runs.c.position).limit(limit))
    return [RunRow(**row) for row in rows.mappings()]


async def _delete_details(connection: AsyncConnection, run_ids: Sequence[str]) -> None:
    await connection.execute(delete(run_events).where(run_events.c.run_id.in_(run_ids)))
    await connection.execute(delete(calls).where(calls.c.run_id.in_(run_ids)))
    await connection.execute(delete(call_reports).where(call_reports.c.run_id.in_(run_ids)))


async def _touch_thread(connection: AsyncConnection, thread_id: str, now: float) -> None:
    """Locks the thread before the run, in the order in which `admit` does; a thread that is gone is no matter."""
    try:
        await lock_thread(connection, thread_id, now)
    except NotFoundError:
        return


async def _locked(connection: AsyncConnection, where: ColumnElement[bool]) -> list[str]:
    """The ids of the runs, locked in the order that all who lock several keep, so that none waits for another."""
    names = select(runs.c.run_id).where(where).order_by(runs.c.run_id).with_for_update()
    return list(await connection.scalars(names))


async def _settle_thread(connection: AsyncConnection, thread_id: str, status: str, state: str | None) -> None:
    others = exists().where(runs.c.thread_id == thread_id, runs.c.status.in_(INFLIGHT))
    values = {"status": case((others, "busy"), else_=status)} | ({} if state is None else {"state": state})
    await connection.execute(update(threads).where(threads.c.thread_id == thread_id).values(**values))

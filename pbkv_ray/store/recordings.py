"""What runs did, call by call, with hidden states: written by the controller, read by `pbkv traces export`."""

import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, dataclass, fields

from sqlalchemy import delete, func, insert, select

from pbkv_ray.core.journal import RecordedCall, RecordedRun
from pbkv_ray.store.database import Database
from pbkv_ray.store.schema import recorded_calls, recorded_runs, runs

PAGE = 64
_CALL_FIELDS = tuple(field.name for field in fields(RecordedCall))


@dataclass(frozen=True, slots=True)
class Recording:
    """A recorded run, and the input it had, as a JSON text, if the store still knows the run."""

    run: RecordedRun
    input: str | None


class Recordings:
    def __init__(self, database: Database) -> None:
        self._db = database

    async def add(self, recorded: Sequence[RecordedRun], max_kept: int) -> int:
        """Stores the runs, one that is there already not again, and keeps the newest `max_kept`. Returns how many
        older ones were deleted for that."""
        async with self._db.write() as connection:
            known = select(recorded_runs.c.run_id).where(recorded_runs.c.run_id.in_([run.run_id for run in recorded]))
            there = set((await connection.execute(known)).scalars())
            for run in recorded:
                if run.run_id in there:
                    continue
                there.add(run.run_id)
                await connection.execute(insert(recorded_runs).values(**_row(run)))
                calls = [
                    {"run_id": run.run_id, "position": position, **asdict(call)}
                    for position, call in enumerate(run.calls)
                ]
                if calls:
                    await connection.execute(insert(recorded_calls), calls)
            excess = (await connection.scalar(select(func.count()).select_from(recorded_runs)) or 0) - max_kept
            if excess <= 0:
                return 0
            oldest = select(recorded_runs.c.run_id).order_by(recorded_runs.c.position).limit(excess)
            gone = list((await connection.execute(oldest)).scalars())
            for start in range(0, len(gone), PAGE):
                part = gone[start : start + PAGE]
                await connection.execute(delete(recorded_calls).where(recorded_calls.c.run_id.in_(part)))
                await connection.execute(delete(recorded_runs).where(recorded_runs.c.run_id.in_(part)))
            return len(gone)

    async def count(self) -> int:
        async with self._db.read() as connection:
            return int(await connection.scalar(select(func.count()).select_from(recorded_runs)) or 0)

    async def read(self, workflow: str | None = None) -> AsyncIterator[Recording]:
        """All recorded runs, or those of one workflow, in the order in which they were stored."""
        last = 0
        while True:
            page = select(recorded_runs).where(recorded_runs.c.position > last).order_by(recorded_runs.c.position)
            if workflow is not None:
                page = page.where(recorded_runs.c.workflow == workflow)
            async with self._db.read() as connection:
                rows = (await connection.execute(page.limit(PAGE))).mappings().all()
                names = [row["run_id"] for row in rows]
                calls = select(recorded_calls).where(recorded_calls.c.run_id.in_(names))
                of: dict[str, list[RecordedCall]] = {name: [] for name in names}
                for call in (await connection.execute(calls.order_by(recorded_calls.c.position))).mappings():
                    of[call["run_id"]].append(RecordedCall(**{name: call[name] for name in _CALL_FIELDS}))
                asked = select(runs.c.run_id, runs.c.request).where(runs.c.run_id.in_(names))
                inputs = {row.run_id: _input(row.request) for row in await connection.execute(asked)}
            if not rows:
                return
            for row in rows:
                last = row["position"]
                run = RecordedRun(
                    row["run_id"],
                    row["workflow"],
                    row["started_s"],
                    row["ended_s"],
                    row["outcome"],
                    of[row["run_id"]],
                )
                yield Recording(run, inputs.get(row["run_id"]))


def _row(run: RecordedRun) -> dict[str, object]:
    return {name: getattr(run, name) for name in ("run_id", "workflow", "outcome", "started_s", "ended_s")}


def _input(request: str) -> str | None:
    """The input alone, keys in order, of a run's stored request: the same task gives the same text."""
    try:
        return json.dumps(json.loads(request)["input"], sort_keys=True)
    except (ValueError, KeyError, TypeError):
        return None

"""The durable record of threads, runs, their events and their calls: SQLite by default, PostgreSQL by URL."""

from pbkv_ray.store.database import Database
from pbkv_ray.store.events import Batch, Events
from pbkv_ray.store.recordings import Recording, Recordings
from pbkv_ray.store.rows import (
    Admission,
    CallRow,
    Ending,
    EventRow,
    NewRun,
    RunRow,
    RunStatus,
    Stop,
    ThreadRow,
    ThreadStatus,
)
from pbkv_ray.store.runs import Runs
from pbkv_ray.store.threads import Threads

__all__ = [
    "Admission",
    "Batch",
    "CallRow",
    "Ending",
    "EventRow",
    "NewRun",
    "Recording",
    "RunRow",
    "RunStatus",
    "Stop",
    "Store",
    "ThreadRow",
    "ThreadStatus",
]


class Store:
    """`await Store.open(url)`: the tables are there. One store a process; all methods may run concurrently."""

    def __init__(self, database: Database, max_events_per_run: int) -> None:
        self._db = database
        self.threads = Threads(database)
        self.runs = Runs(database)
        self.events = Events(database, max_events_per_run)
        self.recordings = Recordings(database)

    @classmethod
    async def open(cls, url: str, *, max_events_per_run: int = 5_000) -> "Store":
        """ConfigError for a URL that is neither sqlite:///FILE nor postgresql://...; UnavailableError when the
        database does not answer."""
        database = Database(url)
        try:
            await database.create_tables()
        except BaseException:
            await database.close()
            raise
        return cls(database, max_events_per_run)

    @property
    def shown(self) -> str:
        return self._db.shown

    @property
    def is_sqlite(self) -> bool:
        return self._db.is_sqlite

    async def close(self) -> None:
        await self._db.close()

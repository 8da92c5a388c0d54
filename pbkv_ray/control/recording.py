"""Keeps what runs did in the store, off the controller's way: a store that is slow or gone costs records only."""

import asyncio
import logging
from collections import Counter
from collections.abc import Mapping

from pbkv_ray.config import ControllerOptions
from pbkv_ray.core.events import Event
from pbkv_ray.core.journal import Journal, JournalOptions, RecordedRun

logger = logging.getLogger(__name__)

EVERY_S = 1.0
SETTLE_S = 2.0  # what the engine says of a call may come after the end of its run
MAX_RETRY_S = 60.0
MAX_WAITING = 1_000  # ended runs that wait for the store
MAX_KEPT = 20_000  # runs in the store; the oldest go first


class Recording:
    def __init__(self, options: ControllerOptions) -> None:
        self._url = options.record_to
        self._journal = Journal(JournalOptions(settle_s=SETTLE_S))
        self._waiting: list[RecordedRun] = []
        self._counts: Counter[str] = Counter()
        self._task: asyncio.Task[None] | None = None

    def heard(self, event: Event) -> None:
        self._journal.note(event)

    def start(self) -> None:
        """Safe to call again; needs the event loop."""
        if self._url and (self._task is None or self._task.done()):
            self._task = asyncio.create_task(self._write_for_ever(), name="pbkv-recording")

    def counts(self) -> Mapping[str, float]:
        if not self._url:
            return {}
        found = {f"recorded_{name}": float(n) for name, n in (self._counts + self._journal.counts).items()}
        return found | {"recorded_runs_open": len(self._journal), "recorded_runs_waiting": len(self._waiting)}

    async def _write_for_ever(self) -> None:
        from pbkv_ray.store import Store  # SQLAlchemy: only who records loads it

        store, pause_s = None, EVERY_S
        while True:
            await asyncio.sleep(pause_s)
            self._waiting += self._journal.take()
            if (excess := len(self._waiting) - MAX_WAITING) > 0:
                del self._waiting[:excess]
                self._counts["runs_left_out"] += excess
            if not self._waiting:
                continue
            batch = list(self._waiting)
            try:
                store = store or await Store.open(self._url)
                self._counts["runs_deleted"] += await store.recordings.add(batch, MAX_KEPT)
            except Exception as error:
                self._counts["errors"] += 1
                logger.warning("%d runs wait for the store: %s", len(batch), error)
                pause_s = min(2 * pause_s, MAX_RETRY_S)
                continue
            pause_s = EVERY_S
            self._counts["runs"] += len(batch)
            self._counts["calls"] += sum(len(run.calls) for run in batch)
            del self._waiting[: len(batch)]

"""Forecasts of many runs off the event loop: the newest request of each run, in batches, one thread at a time."""

import asyncio
import logging
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from pbkv_ray.core.forecast import CallFacts, Forecast
from pbkv_ray.predict.folder import ModelFolder
from pbkv_ray.predict.serving import Served

# run_id, the history that was asked about, what was known of its last call, the answer
Deliver = Callable[[str, tuple[str, ...], CallFacts | None, Forecast], None]
T = TypeVar("T")
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Asked:
    workflow: str
    history: tuple[str, ...]
    call: CallFacts | None


class Background:
    """`submit` never waits. `deliver` is called on the event loop that runs `run`, only with what is better than the
    counts alone; a run that moved on while its forecast was made gets that one too, and the next one after it:
    compare `history`."""

    def __init__(
        self, served: Served, deliver: Deliver, horizon: int = 10, batch: int = 64, max_waiting: int = 4_096
    ) -> None:
        self.counters: Counter[str] = Counter()
        self._served = served
        self._deliver = deliver
        self._horizon = horizon
        self._batch = batch
        self._max_waiting = max_waiting
        self._waiting: OrderedDict[str, _Asked] = OrderedDict()
        self._news = asyncio.Event()

    def submit(self, run_id: str, workflow: str, history: Sequence[str], call: CallFacts | None = None) -> None:
        self._waiting.pop(run_id, None)
        self._waiting[run_id] = _Asked(workflow, tuple(history), call)
        if len(self._waiting) > self._max_waiting:
            self._waiting.popitem(last=False)
            self.counters["dropped"] += 1
        self._news.set()

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await self._news.wait()
            batch = self._take()
            if not batch:
                self._news.clear()
                continue
            try:
                await self._answer(batch)
            except Exception:
                self.counters["errors"] += 1
                logger.exception("a batch of forecasts failed")

    async def watch(self, models: ModelFolder, every_s: float = 10.0) -> None:
        """Until cancelled: put new and changed models into service."""
        while True:
            try:
                for workflow, net in (await asyncio.to_thread(models.fresh)).items():
                    self._served.install(workflow, net)
            except Exception:
                self.counters["errors"] += 1
                logger.exception("the models cannot be read")
            await asyncio.sleep(every_s)

    def _take(self) -> list[tuple[str, _Asked]]:
        """The oldest requests of one workflow."""
        if not self._waiting:
            return []
        workflow = next(iter(self._waiting.values())).workflow
        taken = [item for item in self._waiting.items() if item[1].workflow == workflow][: self._batch]
        for run_id, _ in taken:
            del self._waiting[run_id]
        return taken

    async def _answer(self, batch: Sequence[tuple[str, _Asked]]) -> None:
        asked = [one for _, one in batch]
        job = self._served.begin(
            asked[0].workflow,
            [one.history for one in asked],
            self._horizon,
            [one.call for one in asked],
            [run_id for run_id, _ in batch],
        )
        if job is None:
            return
        try:
            # Not wait_for: Python 3.11's forgets that it was cancelled when the answer comes in the same moment, and
            # `run` would go on for ever.
            async with asyncio.timeout(self._served.options.stuck_s):
                together, seconds = await _in_thread(job.run)
        except TimeoutError:
            self._served.drop(job, "net_stuck")
            return
        except Exception:
            self._served.drop(job, "net_errors")
            logger.exception("the net of %s failed and is out of service", job.workflow)
            return
        for (run_id, one), forecast in zip(batch, self._served.finish(job, together, seconds), strict=True):
            if forecast is not None:
                self.counters["delivered"] += 1
                self._deliver(run_id, one.history, one.call, forecast)


async def _in_thread(work: Callable[[], T]) -> T:
    """`work` on a daemon thread of its own: one that never comes back must not keep a pool, or the process, busy."""
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[T] = loop.create_future()

    def settle(tell: Callable[[], None]) -> None:
        if not answer.done():
            tell()

    def work_and_tell() -> None:
        try:
            tell = partial(answer.set_result, work())
        except Exception as error:
            tell = partial(answer.set_exception, error)
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(settle, tell)

    threading.Thread(target=work_and_tell, name="pbkv-net", daemon=True).start()
    return await answer

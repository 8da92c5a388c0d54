"""Forecasts of many runs off the event loop: the newest request of each run, in batches, in one thread."""

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pbkv_ray.core.forecast import Forecast
from pbkv_ray.predict.serving import CallFacts, ModelFolder, Served

Deliver = Callable[[str, tuple[str, ...], Forecast], None]  # run_id, the history that was asked about, the answer


@dataclass(frozen=True, slots=True)
class _Asked:
    workflow: str
    history: tuple[str, ...]
    call: CallFacts | None


class Background:
    """`submit` never waits. `deliver` is called on the event loop that runs `run`; a run that moved on while its
    forecast was made gets that one too, and the next one after it: compare `history`."""

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
            for run_id, history, forecast in await asyncio.to_thread(self._answer, batch):
                self.counters["delivered"] += 1
                self._deliver(run_id, history, forecast)

    async def watch(self, models: ModelFolder, every_s: float = 10.0) -> None:
        """Until cancelled: put new and changed models into service."""
        while True:
            for workflow, net in (await asyncio.to_thread(models.fresh)).items():
                self._served.install(workflow, net)
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

    def _answer(self, batch: Sequence[tuple[str, _Asked]]) -> list[tuple[str, tuple[str, ...], Forecast]]:
        asked = [one for _, one in batch]
        forecasts = self._served.forecasts(
            asked[0].workflow, [one.history for one in asked], self._horizon, [one.call for one in asked]
        )
        return [
            (run_id, one.history, forecast)
            for (run_id, one), forecast in zip(batch, forecasts, strict=True)
            if forecast is not None
        ]

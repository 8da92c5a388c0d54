"""A router's copy of the controller's routing table: follows it, decides from it, asks only for runs that it ought to
know and does not. Where a run that begins was placed, the controller is told afterwards.

Knows no Serve. Everything of the controller's may fail: then the copy goes on with what it knows.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from time import time
from typing import Protocol

from pbkv_ray.core.places import Changes, Place
from pbkv_ray.core.routes import Routes
from pbkv_ray.core.routing import Decision, RoutingOptions
from pbkv_ray.errors import UnavailableError
from pbkv_ray.routing.asked import Asked
from pbkv_ray.routing.metrics import METRICS, RouterMetrics

log = logging.getLogger(__name__)

RETRY_S = 0.5
PAUSE_S = 1.0  # no consult so long after one that failed: a dead controller costs one call its time, not every call
REBUILD_S = 30.0  # so long a restarted controller may not know all runs and replicas yet
MAX_MOVES = 4_096


class Controller(Protocol):
    """`control.client.ControllerClient`, as far as it is needed. Raises UnavailableError."""

    async def routes(self, since: int, wait_s: float = ...) -> tuple[bool, Changes]: ...
    async def place(
        self, run_id: str, prompt_tokens: int, among: Sequence[str], timeout_s: float
    ) -> tuple[Decision, Place | None] | None: ...
    async def settled(self, homes: dict[str, str]) -> None: ...


class TableCopy:
    """Belongs to one event loop, that of its first `follow`."""

    def __init__(
        self,
        controller: Controller,
        options: RoutingOptions | None = None,
        *,
        consult_timeout_s: float = 0.1,
        clock: Callable[[], float] = time,
        metrics: RouterMetrics = METRICS,
    ) -> None:
        self.routes = Routes(options)
        self._controller = controller
        self._consult_timeout_s = consult_timeout_s
        self._clock = clock
        self._metrics = metrics
        self._version = -1
        self._merge_until_s = 0.0
        self._silent_until_s = 0.0
        self._asking: dict[str, asyncio.Task[Decision | None]] = {}
        self._moves: dict[str, str] = {}
        self._following: asyncio.Task[None] | None = None
        self._telling: asyncio.Task[None] | None = None

    def follow(self) -> None:
        """Safe to call again; needs the running loop."""
        if self._following is None or self._following.done():
            self._following = asyncio.get_running_loop().create_task(self._follow(), name="pbkv-routes")

    async def close(self) -> None:
        tasks = [task for task in (self._following, self._telling, *self._asking.values()) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def choose(self, asked: Asked, among: Sequence[str]) -> Decision | None:
        """The replica for a call, of those in `among`; None only if there is none."""
        run_id, tokens = asked.run_id, asked.prompt_tokens
        news = False  # whether the controller would not learn of the run's place from us otherwise
        place = self.routes.get(run_id)
        if place is None and (news := self._nothing_to_ask(asked)):
            self.routes.started(run_id, asked.parent_run_id)
        elif (place is None or self._astray(run_id, place)) and (
            placed := await self._consult(run_id, tokens, among)
        ) is not None:
            return placed
        home = place.home if (place := self.routes.get(run_id)) is not None else None
        decision = self.routes.route(run_id, tokens, self._clock(), among)
        if decision is not None and (news or home not in (None, decision.replica)):
            self._tell(run_id, decision.replica)
        return decision

    def _nothing_to_ask(self, asked: Asked) -> bool:
        """A run that begins has its context nowhere, but for its family's; how busy replicas are is known here."""
        parent = asked.parent_run_id
        return asked.begins and self._version >= 0 and (parent is None or self.routes.family_home(parent) is not None)

    def _astray(self, run_id: str, place: Place) -> bool:
        """Its family has no place here: siblings that begin at once must not each find one of their own."""
        return place.home is None and place.parent is not None and self.routes.family_home(run_id) is None

    async def _consult(self, run_id: str, prompt_tokens: int, among: Sequence[str]) -> Decision | None:
        """Ask the controller for a place. Calls of one run that come at once share the question: the first of them
        takes the answer, the others find the run in the table."""
        if self._clock() < self._silent_until_s:
            self._metrics.consults.labels("skipped").inc()
            return None
        if (task := self._asking.get(run_id)) is not None:
            await asyncio.shield(task)
            return None
        task = asyncio.get_running_loop().create_task(self._ask(run_id, prompt_tokens, among))
        self._asking[run_id] = task
        task.add_done_callback(lambda _: self._asking.pop(run_id, None))
        return await asyncio.shield(task)  # a caller that leaves does not take the answer from its siblings

    async def _ask(self, run_id: str, prompt_tokens: int, among: Sequence[str]) -> Decision | None:
        try:
            placed = await self._controller.place(run_id, prompt_tokens, among, self._consult_timeout_s)
        except UnavailableError as error:
            self._silent_until_s = self._clock() + PAUSE_S
            self._metrics.consults.labels("failed").inc()
            log.info("no place for run %s: %s", run_id, error)
            return None
        if placed is None:
            self._metrics.consults.labels("refused").inc()
            return None
        decision, place = placed
        self._metrics.consults.labels("placed").inc()
        known = self.routes.get(run_id)
        if (known is not None and known.home is not None) or decision.replica not in among:
            return None
        self.routes.adopt(run_id, place, decision, prompt_tokens, self._clock())
        return decision

    def _tell(self, run_id: str, home: str) -> None:
        if len(self._moves) >= MAX_MOVES:
            self._metrics.moves_lost.inc()
            return
        self._moves[run_id] = home
        if self._telling is None or self._telling.done():
            self._telling = asyncio.get_running_loop().create_task(self._tell_all(), name="pbkv-moves")

    async def _tell_all(self) -> None:
        while self._moves:
            moves, self._moves = self._moves, {}
            try:
                await self._controller.settled(moves)
            except UnavailableError:
                self._metrics.moves_lost.inc(len(moves))

    async def _follow(self) -> None:
        while True:
            try:
                await self._step()
            except UnavailableError as error:
                self._metrics.syncs.labels("failed").inc()
                log.info("the routing table is not renewed: %s", error)
                await asyncio.sleep(RETRY_S)

    async def _step(self) -> None:
        restarted, changes = await self._controller.routes(self._version)
        now_s = self._clock()
        if restarted:
            self._merge_until_s = now_s + REBUILD_S
        merge = now_s < self._merge_until_s
        self.routes.apply(changes, now_s, merge=merge)
        self._version = changes.version
        if self._merge_until_s and not merge:
            self._merge_until_s, self._version = 0.0, -1  # it knows all by now: take the whole table once
        self._metrics.syncs.labels("merged" if merge else "full" if changes.full else "changes").inc()
        self._metrics.runs.set(len(self.routes))

"""What routers ask of the controller actor: what is new in the routing table, and a place for an unknown run."""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from time import time

from pbkv_ray.core.actions import Action
from pbkv_ray.core.controller import Controller
from pbkv_ray.core.places import Changes, Place
from pbkv_ray.core.placing import Placing
from pbkv_ray.core.routing import Decision, RoutingOptions

COALESCE_S = 0.05  # a router, or a replica, hears of changes at most so often


class RoutingDesk:
    """A part of `control.actor.ControllerHost`."""

    epoch: str

    def _open_desk(self, controller: Controller, max_runs: int) -> None:
        self._placing = Placing(controller, RoutingOptions(max_runs=max_runs))
        self._moved = asyncio.Event()

    async def routes(self, known_epoch: str | None, since: int, timeout_s: float) -> tuple[str, Changes]:
        """Long poll of a router: what has changed since version `since` of this controller, at the latest after
        `timeout_s`. A router that names another epoch gets everything."""
        table = self._placing.routes
        since = since if known_epoch == self.epoch else -1
        if table.version == since:
            self._moved.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self._moved.wait()
            await asyncio.sleep(COALESCE_S)  # what changes in one moment travels together
        return self.epoch, table.changes(since)

    async def place(
        self, run_id: str, prompt_tokens: int, among: Sequence[str]
    ) -> tuple[Decision, Place | None] | None:
        """See `Placing.place`. `among`: the replicas that the router can reach."""
        placed = self._placing.place(run_id, prompt_tokens, time(), among)
        self._moved.set()
        return placed

    async def settled(self, homes: dict[str, str]) -> None:
        """Runs that a router has placed or moved, and where to."""
        self._placing.settled(homes)
        self._moved.set()

    def _routes_follow(self, actions: Sequence[Action]) -> None:
        """After every event of the controller, with what it brought."""
        self._placing.performed(actions)
        self._moved.set()

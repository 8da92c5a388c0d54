"""One replica's link with the controller: hints go to its engine, facts of its engine go to the controller.

Everything here may fail and calls go on: without hints the engine keeps to recency (paper: retired-first needs
endings, the score needs forecasts), without facts the controller credits the replica with nothing.
"""

import asyncio
import logging
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

from pbkv_ray.config import ControllerOptions, EngineOptions
from pbkv_ray.control.actor import start_controller
from pbkv_ray.control.client import ControllerClient
from pbkv_ray.core.actions import PublishForecast
from pbkv_ray.core.events import Residency
from pbkv_ray.engine.facts import Fact, FactsReceiver
from pbkv_ray.engine.link import HintLink, link_to
from pbkv_ray.engine.policies import policy_arguments
from pbkv_ray.errors import UnavailableError

logger = logging.getLogger(__name__)

STOCK = frozenset({"lru", "session"})  # SGLang as it is: nobody there reads hints
RETRY_S = 0.5
REPORT_S = 1.0


class Steering:
    """Made before the engine, which needs the facts' address; `start` afterwards, in the replica's event loop."""

    def __init__(self, options: EngineOptions, application: str, replica: str) -> None:
        self.replica = replica
        self.epoch = uuid.uuid4().hex
        self.active = options.policy not in STOCK
        self.options = options
        self._application = application
        self._residency: Residency | None = None
        self._link: HintLink | None = None
        self._receiver: FactsReceiver | None = None
        self._tasks: list[asyncio.Task[None]] = []
        if self.active:
            self._receiver = FactsReceiver(self._heard, replica=replica, epoch=self.epoch)
            steered = policy_arguments(options.policy, facts=self._receiver.endpoint)
            self.options = replace(options, extra=steered | options.extra)

    def start(self, engine: Any) -> None:
        """Safe to call again."""
        if not self.active or self._tasks:
            return
        self._link = link_to(engine)
        client = ControllerClient(self._application)
        self._tasks = [
            asyncio.create_task(self._for_ever(lambda: self._take_hints(client)), name="pbkv-hints"),
            asyncio.create_task(self._for_ever(lambda: self._report(client)), name="pbkv-facts"),
        ]

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._link is not None:
            await asyncio.to_thread(self._link.close)
        if self._receiver is not None:
            await asyncio.to_thread(self._receiver.close)

    async def _take_hints(self, client: ControllerClient) -> None:
        assert self._link is not None
        for action in await client.hints(self.replica, self.epoch):
            if isinstance(action, PublishForecast):
                self._link.publish(action)
            else:
                self._link.retire(action.run_id, action.at_s)

    async def _report(self, client: ControllerClient) -> None:
        await asyncio.sleep(REPORT_S)
        if self._link is not None:
            self._link.tick()
        if (residency := self._residency) is not None:
            self._residency = None
            await client.report(residency)

    async def _for_ever(self, step: Callable[[], Any]) -> None:
        while True:
            try:
                await step()
            except UnavailableError as error:
                logger.info("no controller: %s", error)
                with suppress(Exception):  # the application's controller may be gone for good: make one
                    await asyncio.to_thread(start_controller, self._application, ControllerOptions())
                await asyncio.sleep(RETRY_S)

    def _heard(self, fact: Fact) -> None:
        """On the receiver's thread; a newer report replaces one that has not been sent."""
        if isinstance(fact, Residency):
            self._residency = fact

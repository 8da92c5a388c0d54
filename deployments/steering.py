"""One replica's link with the controller: hints go to its engine, facts of its engine go to the controller.

Everything here may fail and calls go on: without hints the engine keeps to recency, without facts the controller
credits the replica with nothing.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from time import monotonic
from typing import Literal

from deployments.vitals import Vitals
from pbkv_ray.config import ControllerOptions
from pbkv_ray.control.actor import start_controller
from pbkv_ray.control.client import ControllerClient
from pbkv_ray.core.actions import PublishForecast
from pbkv_ray.core.events import CallState, Residency
from pbkv_ray.core.health import Health
from pbkv_ray.core.states import compact
from pbkv_ray.engine.facts import Evicted, Fact, HiddenState
from pbkv_ray.engine.server import EngineServer
from pbkv_ray.errors import PbkvError, UnavailableError

logger = logging.getLogger(__name__)

RETRY_S = 0.5
REPORT_S = 1.0
LINGER_S = 0.02  # hidden states of one batch share a message
MAX_STATES = 2_048  # that wait for the controller
_SIGNALS: dict[str, Literal["prefill", "decode"]] = {"prefill": "prefill", "decoded": "decode"}


def state_of(fact: HiddenState) -> CallState:
    """What the controller and the store get of it."""
    return CallState(fact.call_id, _SIGNALS[fact.token], compact(fact.vector), fact.blocks)


class Steering:
    """`heard` takes the engine's facts from its start on; `start` needs the replica's event loop."""

    def __init__(self, application: str, controller: ControllerOptions, *, by_score: bool = True) -> None:
        """`by_score`: the engine's policy looks at hints."""
        self.health = Health(by_score)
        self._application = application
        self._controller = controller
        self._residency: Residency | None = None
        self._vitals = Vitals()
        self._client: ControllerClient | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._states: deque[CallState] = deque(maxlen=MAX_STATES)
        self._states_dropped = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._news = asyncio.Event()

    def heard(self, fact: Fact) -> None:
        """On the receiver's thread; a newer report replaces one that has not been sent."""
        self._vitals.heard(fact)
        if isinstance(fact, Residency):
            self._residency = fact
        elif isinstance(fact, Evicted):
            self.health.told(fact.fallbacks + fact.failures, fact.trusted, monotonic())
        elif isinstance(fact, HiddenState):
            self._states_dropped += len(self._states) == MAX_STATES
            self._states.append(state_of(fact))
            if self._loop is not None:
                with suppress(RuntimeError):  # the replica is ending, its loop is closed
                    self._loop.call_soon_threadsafe(self._news.set)

    def start(self, server: EngineServer) -> None:
        """Safe to call again."""
        if self._tasks:
            return
        client = self._client = ControllerClient(self._application)
        self._loop = asyncio.get_running_loop()
        self._tasks = [
            asyncio.create_task(self._for_ever(lambda: self._take_hints(server, client)), name="pbkv-hints"),
            asyncio.create_task(self._for_ever(lambda: self._report(server, client)), name="pbkv-facts"),
            asyncio.create_task(self._for_ever(lambda: self._send_states(client)), name="pbkv-states"),
            asyncio.create_task(self._obey(server, client), name="pbkv-policy"),
        ]

    async def close(self, replica: str) -> None:
        """The replica has drained and stops: its runs need other homes, at once."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._client is not None:
            with suppress(UnavailableError):  # then it finds out by the silence
                await self._client.leave(replica)

    async def _obey(self, server: EngineServer, client: ControllerClient) -> None:
        """Once: what was ordered of all engines before this one started."""
        while True:
            try:
                policy = await client.ordered_policy()
                break
            except UnavailableError:  # `_for_ever` makes a controller
                await asyncio.sleep(RETRY_S)
        if policy not in (None, server.policy):
            try:
                await server.switch_policy(str(policy))
            except PbkvError as error:
                logger.warning("policy %s was ordered of all engines, and not taken here: %s", policy, error)

    async def _take_hints(self, server: EngineServer, client: ControllerClient) -> None:
        actions = await client.hints(server.replica, server.epoch)
        self.health.heard(monotonic())
        for action in actions:
            if isinstance(action, PublishForecast):
                server.publish(action)
            else:
                await server.retire(action.run_id, action.at_s)

    async def _report(self, server: EngineServer, client: ControllerClient) -> None:
        await asyncio.sleep(REPORT_S)
        server.tick()
        if (residency := self._residency) is not None:
            self._residency = None
            state = self.health.following(monotonic(), lru_in_charge=self._vitals.lru_in_charge)
            await client.report(residency, {**self._vitals.numbers(), "state": state})

    async def _send_states(self, client: ControllerClient) -> None:
        await self._news.wait()
        await asyncio.sleep(LINGER_S)
        self._news.clear()
        states = [self._states.popleft() for _ in range(len(self._states))]
        dropped, self._states_dropped = self._states_dropped, 0
        if states:
            await client.states(states, dropped)  # lost with an error: the next call brings others

    async def _for_ever(self, step: Callable[[], Awaitable[None]]) -> None:
        while True:
            try:
                await step()
            except UnavailableError as error:
                logger.info("no controller: %s", error)
                with suppress(Exception):  # the application's controller may be gone for good: make one
                    await asyncio.to_thread(start_controller, self._application, self._controller)
                await asyncio.sleep(RETRY_S)

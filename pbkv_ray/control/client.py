"""How other processes talk to the controller actor: found by name, lost and found again, never waited for long."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import RayError

from pbkv_ray.control.actor import NAMESPACE, controller_name
from pbkv_ray.core.actions import Action
from pbkv_ray.core.events import Batch, CallState, Residency
from pbkv_ray.core.places import Changes, Place
from pbkv_ray.core.routing import Decision
from pbkv_ray.errors import UnavailableError


class ControllerClient:
    """One per process. `on_new_epoch` is called when the controller turns out to have restarted."""

    def __init__(
        self, application: str, *, timeout_s: float = 2.0, on_new_epoch: Callable[[], None] | None = None
    ) -> None:
        self._name = controller_name(application)
        self._timeout_s = timeout_s
        self._on_new_epoch = on_new_epoch
        self._actor: Any = None
        self._epoch: str | None = None
        self._acknowledged = 0

    async def send(self, batch: Batch) -> None:
        """For `EventPump`. Raises UnavailableError."""
        self._seen(await self._ask("events", batch))

    async def hints(self, replica: str, engine_epoch: str, wait_s: float = 5.0) -> Sequence[Action]:
        """Long poll: what the replica is to know, oldest first; empty after `wait_s`. The call acknowledges what the
        one before it returned, so a caller that dies in between gets it again."""
        epoch, number, actions = await self._ask(
            "hints", replica, engine_epoch, self._epoch, self._acknowledged, wait_s, timeout_s=wait_s + self._timeout_s
        )
        self._seen(epoch)
        self._acknowledged = number
        return tuple(actions)

    async def report(self, residency: Residency, numbers: Mapping[str, float] | None = None) -> None:
        await self._ask("report", residency, numbers)

    async def leave(self, replica: str) -> None:
        await self._ask("leave", replica)

    async def routes(self, since: int, wait_s: float = 5.0) -> tuple[bool, Changes]:
        """Long poll: whether the controller is another one than before, and what is new in its routing table since
        version `since`."""
        before = self._epoch
        epoch, changes = await self._ask("routes", before, since, wait_s, timeout_s=wait_s + self._timeout_s)
        self._seen(epoch)
        return before is not None and epoch != before, changes

    async def place(
        self, run_id: str, prompt_tokens: int, among: Sequence[str], timeout_s: float
    ) -> tuple[Decision, Place | None] | None:
        """A replica for a run that is not known here; None when the controller has none."""
        found: tuple[Decision, Place | None] | None = await self._ask(
            "place", run_id, prompt_tokens, among, timeout_s=timeout_s
        )
        return found

    async def settled(self, homes: dict[str, str]) -> None:
        await self._ask("settled", homes)

    async def states(self, states: Sequence[CallState], dropped: int = 0) -> None:
        """Hidden states of calls; `dropped`: how many were lost since the last time."""
        await self._ask("states", tuple(states), dropped)

    async def order_policy(self, policy: str) -> None:
        """Engines that start from now on follow it, as long as this controller lives."""
        await self._ask("order_policy", policy)

    async def ordered_policy(self) -> str | None:
        found: str | None = await self._ask("ordered_policy")
        return found

    async def runs(self, limit: int = 100) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = await self._ask("runs", limit)
        return found

    async def live(self, limit: int) -> dict[str, Any]:
        """What the live page shows; see `core.live.LiveView.snapshot`."""
        found: dict[str, Any] = await self._ask("live", limit)
        return found

    async def replicas(self) -> dict[str, dict[str, Any]]:
        found: dict[str, dict[str, Any]] = await self._ask("replicas")
        return found

    async def counts(self) -> dict[str, float]:
        found: dict[str, float] = await self._ask("counts")
        return found

    def _seen(self, epoch: str) -> None:
        if self._epoch is not None and epoch != self._epoch and self._on_new_epoch is not None:
            self._on_new_epoch()
        self._epoch = epoch

    async def _ask(self, method: str, *arguments: Any, timeout_s: float | None = None) -> Any:
        if not ray.is_initialized():  # it has been shut down; to ask for an actor would start a cluster of its own
            raise UnavailableError(
                f"the controller {self._name} cannot be asked for {method}: Ray has not been started"
            )
        try:
            if self._actor is None:
                # A lookup in the cluster's table; it blocks, so it stays off the event loop.
                self._actor = await asyncio.to_thread(ray.get_actor, self._name, namespace=NAMESPACE)
            reference = getattr(self._actor, method).remote(*arguments)
            # Not wait_for: Python 3.11's forgets that it was cancelled when the answer comes in the same moment.
            async with asyncio.timeout(timeout_s or self._timeout_s):
                return await reference
        except (RayError, ValueError, TimeoutError) as error:
            self._actor = None
            raise UnavailableError(f"the controller {self._name} did not answer {method}: {error!r}") from error

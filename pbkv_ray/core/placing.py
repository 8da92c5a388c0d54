"""Feeds the routing table with what the controller hears. A listener of `core.controller`; pure as that is."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from pbkv_ray.core.actions import Action, RetireRun
from pbkv_ray.core.controller import Controller
from pbkv_ray.core.events import CallFinished, Event, ReplicaJoined, ReplicaLeft, Residency, RunStarted
from pbkv_ray.core.places import Place
from pbkv_ray.core.routes import Routes
from pbkv_ray.core.routing import Decision, RoutingOptions


class Placing:
    """`routes` is the table that routers copy."""

    def __init__(self, controller: Controller, options: RoutingOptions | None = None) -> None:
        self.routes = Routes(options)
        self._controller = controller
        self._handlers: dict[type, Callable[[Any], None]] = {
            RunStarted: lambda event: self.routes.started(event.run_id, event.parent_run_id),
            CallFinished: self._call_finished,
            ReplicaJoined: lambda event: self.routes.joined(event.replica, event.epoch),
            ReplicaLeft: lambda event: self.routes.left(event.replica),
            Residency: self._residency,
        }
        controller.listeners.append(self.heard)

    def heard(self, event: Event) -> None:
        handler = self._handlers.get(type(event))
        if handler is not None:
            handler(event)

    def _call_finished(self, event: CallFinished) -> None:
        if event.reason in ("stop", "length"):
            cached = event.device_cached_tokens + event.host_cached_tokens
            self.routes.finished(event.run_id, event.replica, event.prompt_tokens, cached)

    def _residency(self, event: Residency) -> None:
        known = self._controller.replicas.get(event.replica)
        if known is not None and known.epoch == event.epoch:
            self.routes.report(
                event.replica,
                event.epoch,
                event.tokens,
                event.queued_prefill_tokens,
                event.at_s,
                event.prefill_tokens_s,
                event.load_tokens_s,
            )

    def performed(self, actions: Sequence[Action]) -> None:
        """A run that is retired, for whatever reason, has no home."""
        for action in actions:
            if isinstance(action, RetireRun):
                self.routes.ended(action.run_id)

    def settled(self, homes: Mapping[str, str]) -> None:
        """A router has chosen these homes. It may be told late, of a run that has ended, or early, before its start."""
        for run_id, home in homes.items():
            if self._controller.knows_of(run_id):
                self.routes.settled(run_id, home)

    def place(
        self, run_id: str, prompt_tokens: int, at_s: float, among: Collection[str]
    ) -> tuple[Decision, Place | None] | None:
        """For a router that does not know the run; None if it has ended, its id is none, or there is no replica."""
        if not self._controller.knows_of(run_id):
            return None
        decision = self.routes.route(run_id, prompt_tokens, at_s, among)
        return None if decision is None else (decision, self.routes.get(run_id))

"""The Ray Serve request router: a call goes where `core.routing` finds it cheapest, else to one of two choices.

Overridden is a private method of Ray's, `_choose_replica_for_request`, as Ray's own CapacityQueueRouter does. The
public `choose_replicas` would not do: calls that one request makes at the same time share its internal id, so without
FIFO matching the base class loses all but the first of them, and with it a call may get the replica that was picked
for another. tests/shells/test_router.py pins what is used of Ray.
"""

import logging
from time import perf_counter
from typing import Any

from ray.serve._private.request_router.pow_2_router import PowerOfTwoChoicesRequestRouter
from ray.serve.config import RequestRouterConfig
from ray.serve.request_router import PendingRequest, RunningReplica

from pbkv_ray.control.client import ControllerClient
from pbkv_ray.core.calls import Call
from pbkv_ray.core.routing import RoutingOptions
from pbkv_ray.routing.asked import Asked, asked_of
from pbkv_ray.routing.decisions import DECISIONS
from pbkv_ray.routing.metrics import METRICS
from pbkv_ray.routing.table import TableCopy

log = logging.getLogger(__name__)
ENTRY = "pbkv_ray.routing.entry:PbkvRouter"


class PbkvRouter(PowerOfTwoChoicesRequestRouter):
    """One in every process that holds a handle of the engines. Its options are those of `router_config`."""

    def initialize_state(self, consult_timeout_s: float = 0.1, **options: Any) -> None:
        self._table = TableCopy(
            ControllerClient(self.app_name), RoutingOptions(**options), consult_timeout_s=consult_timeout_s
        )

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        self._table.follow()

    async def _choose_replica_for_request(
        self, pending_request: PendingRequest, *, is_retry: bool = False
    ) -> RunningReplica:
        asked = asked_of(pending_request.args)
        if asked is None or is_retry:  # a retry was turned away by the replica that was chosen for it
            METRICS.fallbacks.labels("rejected" if is_retry else "no_run").inc()
        else:
            while not self._replicas:
                self._replicas_updated_event.clear()
                await self._replicas_updated_event.wait()
            began = perf_counter()
            try:
                chosen = await self._cheapest(asked, pending_request.args[0])
            except Exception:  # a call never fails for the sake of its place
                METRICS.fallbacks.labels("error").inc()
                log.exception("no replica chosen for a call of run %s", asked.run_id)
                chosen = None
            METRICS.seconds.observe(perf_counter() - began)
            if chosen is not None:
                return chosen
        return await super()._choose_replica_for_request(pending_request, is_retry=is_retry)

    async def _cheapest(self, asked: Asked, call: Any) -> RunningReplica | None:
        open_ = self.select_available_replicas()
        if not open_:
            METRICS.fallbacks.labels("full").inc()  # two choices know how to wait
            return None
        names = [replica.replica_id.unique_id for replica in open_]
        decision = await self._table.choose(asked, names)
        chosen = next(
            (known for id_, known in self._replicas.items() if decision and id_.unique_id == decision.replica), None
        )
        if decision is None or chosen is None:  # it left while the controller was asked
            METRICS.fallbacks.labels("absent").inc()
            return None
        METRICS.calls.labels(decision.reason).inc()
        if isinstance(call, Call):
            DECISIONS.keep(call.call_id, decision)
        log.debug("call of run %s: %s", asked.run_id, decision)
        return chosen


def router_config(**options: Any) -> RequestRouterConfig:
    """For the deployment of the engines. options: `consult_timeout_s` and the fields of RoutingOptions."""
    return RequestRouterConfig(request_router_class=ENTRY, request_router_kwargs=options)

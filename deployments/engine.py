"""The Serve deployment of engines, and the transport that reaches it through a handle.

A replica holds one SGLang engine. `EngineReplica` is a plain class; Ray Serve is joined in `engine_app`.
"""

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

from deployments.steering import Steering
from pbkv_ray.config import ControllerOptions, EngineOptions
from pbkv_ray.core.calls import Call, Caller, Chunk
from pbkv_ray.engine.policies import STOCK
from pbkv_ray.engine.server import EngineServer
from pbkv_ray.errors import ConfigError, PbkvError

logger = logging.getLogger(__name__)

Json = dict[str, Any]
PASSED_ENVIRONMENT = ("XDG_CACHE_HOME", "HF_HOME", "HF_HUB_OFFLINE")  # where models are; workers do not inherit it


def default_controller(application: str) -> ControllerOptions:
    return ControllerOptions()


@dataclass(frozen=True, slots=True)
class EngineDeploymentOptions:
    """How many engines there are and what each may hold.

    max_ongoing_requests: calls that a replica takes; those beyond the engine's running requests wait in SGLang's
    queue, where the radix cache sees them coming.
    autoscaling: Ray Serve's `autoscaling_config`; it replaces `replicas`.
    gpus: GPUs a replica, 0 on a machine without; None: `tensor_parallel` if the cluster has GPUs.
    router: Ray Serve's RequestRouterConfig, None for its default (power of two choices).
    controller: application -> options of its controller, which whoever misses it starts.
    """

    replicas: int = 1
    max_ongoing_requests: int = 256
    cpus: float = 1.0
    gpus: int | None = None
    autoscaling: Json | None = None
    graceful_shutdown_timeout_s: float = 30.0
    health_check_period_s: float = 10.0
    health_check_timeout_s: float = 30.0
    environment: dict[str, str] = field(default_factory=dict)
    router: Any = None
    controller: Callable[[str], ControllerOptions] = default_controller

    def __post_init__(self) -> None:
        if self.replicas < 1 or self.max_ongoing_requests < 1:
            raise ConfigError(
                f"replicas is {self.replicas} and max_ongoing_requests {self.max_ongoing_requests}; both need one"
            )


class EngineReplica:
    """One engine in one Serve replica. Replies carry the replica's id."""

    def __init__(
        self,
        options: EngineOptions,
        health_timeout_s: float = 25.0,
        controller: Callable[[str], ControllerOptions] = default_controller,
    ) -> None:
        self.replica_id = _replica_id()
        self._health_timeout_s = health_timeout_s
        by_score = options.policy not in STOCK
        self.steering = Steering(_application(), controller(_application()), by_score=by_score)
        self.server = EngineServer(
            options,
            replica=self.replica_id,
            on_death=_end_replica,
            on_fact=self.steering.heard,
            hidden_states=options.hidden_states,
        )

    async def stream(self, call: Call) -> AsyncIterator[Chunk]:
        """`Transport.stream` as a Serve streaming method."""
        async with contextlib.aclosing(self.server.stream(call)) as chunks:
            async for chunk in chunks:
                yield chunk

    async def openai_chat(self, body: Json, caller: Caller | None, cache_salt: str | None) -> Json:
        """OpenAI's chat completions without streaming; see `EngineServer.openai_chat`."""
        answer = await self.server.openai_chat({**body, "stream": False}, caller, cache_salt)
        assert isinstance(answer, dict)
        return answer

    async def openai_stream(self, body: Json, caller: Caller | None, cache_salt: str | None) -> AsyncIterator[bytes]:
        """OpenAI's chat completions as the bytes of its SSE stream."""
        answer = await self.server.openai_chat({**body, "stream": True}, caller, cache_salt)
        assert not isinstance(answer, dict)
        async with contextlib.aclosing(answer) as pieces:
            async for piece in pieces:
                yield piece

    async def abort(self, call_id: str) -> None:
        self.server.abort(call_id)

    async def models(self) -> Json:
        return await self.server.models()

    async def metrics_text(self) -> str:
        return await asyncio.to_thread(self.server.metrics_text) + self._state_text()

    def _state_text(self) -> str:
        overseen = getattr(self.server.metrics, "overseen", None)
        lru = overseen is not None and overseen.state != "policy"
        state = self.steering.health.following(monotonic(), lru_in_charge=lru)
        name, what = "pbkv_engine_state", "How it follows its hints: 2 EXACT, 1 DEGRADED, 0 FALLBACK (LRU)."
        return f'# HELP {name} {what}\n# TYPE {name} gauge\n{name}{{replica="{self.replica_id}"}} {int(state)}\n'

    async def labelled_metrics(self) -> tuple[str, str]:
        """This replica's id, and `metrics_text`."""
        return self.replica_id, await self.metrics_text()

    async def policy(self, policy: str | None, replica: str | None) -> tuple[str, Json]:
        """This replica's id and its cache policy, changed before to `policy` if that is for this replica."""
        error = {}
        if policy is not None and replica in (None, self.replica_id):
            try:
                await self.server.switch_policy(policy)
            except PbkvError as failed:
                error = {"error": str(failed)}
        return self.replica_id, {**self.server.policy_state(), **error}

    async def load(self) -> Json:
        """What the scheduler holds now: running and waiting requests. For tests and operators."""
        return await self.server.load()

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Ray Serve asks for it; `deployments.scaling` decides by it."""
        load = await self.server.load()
        return {"queued_prefill_tokens": float(load["waiting_tokens"]), "running_calls": float(load["running"])}

    async def pids(self) -> list[int]:
        """This process first, then the engine's. For tests and operators."""
        return [os.getpid(), *sorted(self.server.pids)]

    async def check_health(self) -> None:
        """Serve calls it, first of all right after the start; raising marks the replica unhealthy."""
        self.steering.start(self.server)
        await self.server.check_health(self._health_timeout_s)

    async def __del__(self) -> None:
        """Serve awaits it when the replica stops in an orderly way; when it does not, the kernel ends the engine."""
        steering, server = getattr(self, "steering", None), getattr(self, "server", None)
        if steering is not None:
            await steering.close(self.replica_id)
        if server is not None:
            await asyncio.to_thread(server.shutdown)


def engine_app(options: EngineOptions, deployment: EngineDeploymentOptions) -> Any:
    """The bound Serve application of the engines; `HandleTransport` takes its handle."""
    from ray import serve

    return serve.deployment(EngineReplica, name="Engine", **serve_options(options, deployment)).bind(
        options, deployment.health_check_timeout_s * 0.8, deployment.controller
    )


def serve_options(options: EngineOptions, deployment: EngineDeploymentOptions) -> Json:
    """The options of the Serve deployment. Pure, but for `gpus=None`, which asks the cluster."""
    gpus = _gpus(options) if deployment.gpus is None else deployment.gpus
    if gpus and gpus < options.tensor_parallel:
        raise ConfigError(f"gpus is {gpus}, tensor_parallel {options.tensor_parallel}; every rank needs a GPU")
    environment = {name: os.environ[name] for name in PASSED_ENVIRONMENT if name in os.environ}
    actor: Json = {
        "num_cpus": deployment.cpus,
        "runtime_env": {"env_vars": environment | deployment.environment},
    }
    chosen: Json = {
        "ray_actor_options": actor,
        "max_ongoing_requests": deployment.max_ongoing_requests,
        "graceful_shutdown_timeout_s": deployment.graceful_shutdown_timeout_s,
        "health_check_period_s": deployment.health_check_period_s,
        "health_check_timeout_s": deployment.health_check_timeout_s,
        "max_constructor_retry_count": 3,  # an engine that does not start three times will not: say so
    }
    if gpus:
        actor["num_gpus"] = gpus
        # SGLang starts a scheduler a rank inside the replica's process: one bundle, so one node, holds them all.
        chosen["placement_group_bundles"] = [{"CPU": deployment.cpus, "GPU": gpus}]
        chosen["placement_group_strategy"] = "STRICT_PACK"
    if deployment.autoscaling is not None:
        chosen["autoscaling_config"] = deployment.autoscaling
    else:
        chosen["num_replicas"] = deployment.replicas
    if deployment.router is not None:
        chosen["request_router_config"] = deployment.router
    return chosen


def _gpus(options: EngineOptions) -> int:
    import ray

    return options.tensor_parallel if ray.cluster_resources().get("GPU", 0) > 0 else 0


def _replica_id() -> str:
    from ray import serve

    return str(serve.get_replica_context().replica_id.unique_id)


def _application() -> str:
    from ray import serve

    return str(serve.get_replica_context().app_name)


def _end_replica(reason: str) -> None:
    """An engine that lost a process does not come back; Serve replaces a dead replica at once."""
    logger.error("the engine is lost, ending this replica: %s", reason)
    os._exit(1)

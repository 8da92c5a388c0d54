"""`pbkv bench routing`: a trace on several real engines behind Ray Serve, under one router after the other.

Real engines with the tiny random-weight model, real routers in this process, real controller, forecasts and hints. Each
router has a handle of its own on the same engines, whose caches are emptied in between. The engines share this
machine's cores: imbalance costs them little and latency says nothing; hits and the spread of the computed tokens are
what is measured.
"""

import asyncio
import json
import os
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import ray
from ray import serve
from ray.llm._internal.serve.routing_policies.prefix_aware.prefix_aware_router import PrefixCacheAffinityRouter
from ray.serve._private.request_router.pow_2_router import PowerOfTwoChoicesRequestRouter
from ray.serve.config import RequestRouterConfig
from ray.serve.experimental.consistent_hash_router import ConsistentHashRouter
from ray.serve.handle import DeploymentHandle

from deployments.app import start_ray
from deployments.engine import EngineDeploymentOptions, EngineReplica, serve_options
from pbkv_ray.config import ControllerOptions, EngineOptions
from pbkv_ray.control.actor import start_controller, stop_controller
from pbkv_ray.control.client import ControllerClient
from pbkv_ray.control.pump import EventPump
from pbkv_ray.core.calls import Caller
from pbkv_ray.core.events import CallFinished, CallStarted, RunEnded, RunStarted
from pbkv_ray.errors import ConfigError, EngineError, UnavailableError
from pbkv_ray.replay.arrivals import ToolWaits, uniform
from pbkv_ray.replay.tallies import spread
from pbkv_ray.replay.token_calls import serve_tokens
from pbkv_ray.replay.workload import TraceRun, Workload, prompt_tokens
from pbkv_ray.routing.asked import Asked
from pbkv_ray.routing.router import PbkvRouter

Json = dict[str, Any]
APPLICATION, ENGINE = "pbkv-bench-routing", "Engine"


@dataclass(frozen=True, slots=True)
class TokenCall(Asked):
    """A call of a trace. prompt: a text with the prefixes of `ids`, for the router that reads texts."""

    prompt: str
    ids: Any
    caller: Caller
    output_tokens: int


class TokenReplica(EngineReplica):
    """An engine that also takes calls as tokens."""

    async def flush(self) -> bool:
        """Forget everything that is cached; False when the engine is not idle."""
        self.server.enter()
        return bool((await self.server.manager.flush_cache(timeout_s=60.0)).success)

    async def tokens(self, call: TokenCall) -> Json:
        """{"prompt", "device", "host": tokens, "replica"}"""
        self.server.enter()
        served = await serve_tokens(self.server.manager, call.ids.tolist(), call.caller, call.output_tokens)
        return {
            "prompt": served.prompt,
            "device": served.device,
            "host": served.host,
            "replica": self.replica_id,
        }


CHOOSING_S: dict[type, list[float]] = {}  # router class of this process -> seconds from a call to its replica


class _Timed:
    async def _choose_replica_for_request(self, *args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        try:
            return await super()._choose_replica_for_request(*args, **kwargs)  # type: ignore[misc]
        finally:
            CHOOSING_S.setdefault(type(self), []).append(time.perf_counter() - began)


class TimedPbkv(_Timed, PbkvRouter):
    def initialize_state(self, consult_timeout_s: float = 1.0, **options: Any) -> None:
        super().initialize_state(consult_timeout_s)  # longer than usual: one machine does three engines' work


class TimedPowerOfTwo(_Timed, PowerOfTwoChoicesRequestRouter):
    pass


class TimedHash(_Timed, ConsistentHashRouter):
    pass


class TimedPrefix(_Timed, PrefixCacheAffinityRouter):
    pass


ROUTERS: dict[str, type] = {"pow2": TimedPowerOfTwo, "pbkv": TimedPbkv, "hash": TimedHash, "prefix": TimedPrefix}


@dataclass(frozen=True, slots=True)
class RoutingBench:
    """pool_fraction: all pools together, as a share of the live footprint of `concurrency` runs."""

    engine: EngineOptions
    routers: tuple[str, ...]
    replicas: int
    pool_fraction: float
    concurrency: int
    tools: ToolWaits = field(default_factory=lambda: ToolWaits(0.1, 0.5))
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.routers or set(self.routers) - set(ROUTERS):
            raise ConfigError(f"routers {', '.join(self.routers)!r}: known are {', '.join(ROUTERS)}")


def bench_routing(workload: Workload, bench: RoutingBench, progress: Callable[[str], None]) -> Json:
    """{"routers": {NAME: {"device_hit", "run_seconds", "imbalance", "added_ms", ...}}, "setup": ...}"""
    pool = workload.pool_tokens(bench.pool_fraction, bench.concurrency) // bench.replicas
    longest = max(call.prompt_tokens + call.output_tokens for _, call in workload.calls())
    pool = max(pool, longest + 512)  # one call must fit
    engine = replace(
        bench.engine,
        device_pool_tokens=pool,
        context_length=longest + 64,
        extra={"sleep_on_idle": True, "skip_tokenizer_init": True, **bench.engine.extra},
    )
    vocabulary = int(json.loads((Path(engine.model) / "config.json").read_text())["vocab_size"])
    rows: Json = {}
    start_ray(bench.replicas + 1)
    try:
        progress(f"starting {bench.replicas} engines")
        with _engines(engine, bench):
            for name in bench.routers:
                with _handle(name) as handle:
                    rows[name] = asyncio.run(_Loop(handle, name, workload, bench, vocabulary).run())
                progress(f"{name}: {json.dumps(rows[name])}")
    finally:
        serve.shutdown()
        ray.shutdown()
    base = rows["pow2"]["choosing_ms"] if "pow2" in rows else {"p50": 0.0, "p99": 0.0}
    for row in rows.values():
        row["added_ms"] = {q: round(row["choosing_ms"][q] - base[q], 3) for q in base}
    about = {
        "trace": workload.name,
        "runs": len(workload),
        "calls": sum(len(run.calls) for run in workload.runs),
        "replicas": bench.replicas,
        "concurrency": bench.concurrency,
        "pool_fraction": bench.pool_fraction,
        "pool_tokens_each": pool,
        "policy": engine.policy,
        "cores": os.cpu_count(),
        "seed": bench.seed,
    }
    return {"routers": rows, "setup": about}


@contextmanager
def _engines(engine: EngineOptions, bench: RoutingBench) -> Iterator[None]:
    deployment = EngineDeploymentOptions(
        replicas=bench.replicas,
        cpus=0.5,
        graceful_shutdown_timeout_s=2.0,
        health_check_period_s=30.0,
        health_check_timeout_s=300.0,
        environment={"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"},
    )
    start_controller(APPLICATION, ControllerOptions())
    replica = serve.deployment(TokenReplica, name=ENGINE, **serve_options(engine, deployment))
    try:
        serve.start(proxy_location="Disabled")  # else its proxy shares port 8000 with whoever serves there
        serve.run(replica.bind(engine, 240.0), name=APPLICATION, route_prefix=None)
        yield
    finally:
        serve.delete(APPLICATION)
        stop_controller(APPLICATION)


@contextmanager
def _handle(router: str) -> Iterator[Any]:
    """A handle of this process whose router is of the named class, whatever the deployment's is: a handle makes its
    router when it first hears of the deployment, so the class is exchanged around the first call. Serve keeps the
    handles that it gives out, with their routers: this one is made by hand."""
    stock = RequestRouterConfig.get_request_router_class
    RequestRouterConfig.get_request_router_class = lambda config: ROUTERS[router]
    try:
        handle = DeploymentHandle(ENGINE, APPLICATION)
        handle.load.remote().result()
    finally:
        RequestRouterConfig.get_request_router_class = stock
    flushed = handle.broadcast("flush").results(timeout_s=120.0)
    if not all(flushed):
        raise EngineError("an engine was not idle between two routers; nothing was measured")
    yield handle


class _Loop:
    """`concurrency` clients; each takes the next run when its last one has ended."""

    def __init__(self, handle: Any, router: str, workload: Workload, bench: RoutingBench, vocabulary: int) -> None:
        self._handle, self._router, self._bench, self._vocabulary = handle, router, bench, vocabulary
        # Ended runs are remembered, so every router gets runs of its own names.
        self._queue = [(n, replace(run, run_id=f"{router}:{run.run_id}")) for n, run in enumerate(workload.runs)][::-1]
        self._controller = ControllerClient(APPLICATION, timeout_s=30.0)
        self._pump = EventPump(f"bench-{router}", self._controller.send)
        self._calls = self._prompt = self._device = self._host = 0
        self._computed: Counter[str] = Counter()
        self._homes: list[int] = []
        self._run_s: list[float] = []

    async def run(self) -> Json:
        await self._replicas_have_joined()
        CHOOSING_S.clear()
        began = time.perf_counter()
        async with asyncio.TaskGroup() as clients:
            for client in range(self._bench.concurrency):
                clients.create_task(self._client(client))
        wall_s = time.perf_counter() - began
        await self._pump.close()
        mean = sum(self._computed.values()) / self._bench.replicas
        chosen = CHOOSING_S.get(ROUTERS[self._router], [])
        if len(chosen) < self._calls:
            raise EngineError(f"{self._router} chose for {len(chosen)} of {self._calls} calls; nothing was measured")
        return {
            "device_hit": round(self._device / max(1, self._prompt), 4),
            "host_hit": round(self._host / max(1, self._prompt), 4),
            "run_seconds": spread(self._run_s),
            "imbalance": round(max(self._computed.values()) / max(1.0, mean), 3),
            "choosing_ms": spread([1e3 * seconds for seconds in chosen]),
            "computed_tokens": sum(self._computed.values()),
            "replicas_per_run": round(float(np.mean(self._homes)), 2),
            "wall_seconds": round(wall_s, 1),
        }

    async def _replicas_have_joined(self) -> None:
        for _ in range(600):
            if (await self._controller.counts())["replicas"] >= self._bench.replicas:
                return
            await asyncio.sleep(0.5)
        raise UnavailableError("the engines did not join the controller in five minutes; nothing was measured")

    async def _client(self, client: int) -> None:
        await asyncio.sleep(2.0 * uniform(self._bench.seed, "start", client))
        while self._queue:
            number, run = self._queue.pop()
            began, homes = time.perf_counter(), set()
            self._pump.emit(RunStarted(run.run_id, run.workflow, time.time()))
            for at in range(len(run.calls)):
                if at:
                    await asyncio.sleep(self._bench.tools.wait_s(run, at, self._bench.seed))
                homes.add(await self._call(run, at, number * 1_000 + at))
            self._pump.emit(RunEnded(run.run_id, "completed", time.time()))
            self._run_s.append(time.perf_counter() - began)
            self._homes.append(len(homes))

    async def _call(self, run: TraceRun, at: int, private: int) -> str:
        call = run.calls[at]
        ids = prompt_tokens(call, self._vocabulary, private)
        text = "".join(f"{block:08x}" for block in call.blocks()) + f"{private:x}."
        caller, call_id = Caller(run.run_id, run.workflow, call.agent, at), uuid.uuid4().hex
        asked = TokenCall(run.run_id, len(ids), text, ids, caller, call.output_tokens, begins=at == 0)
        self._pump.emit(CallStarted(run.run_id, call.agent, at, call_id, time.time()))
        began = time.perf_counter()
        got: Json = await self._handle.options(session_id=run.run_id).tokens.remote(asked)
        seconds, computed = time.perf_counter() - began, got["prompt"] - got["device"] - got["host"]
        self._pump.emit(
            CallFinished(
                run.run_id,
                call.agent,
                at,
                call_id,
                time.time(),
                "stop",
                got["prompt"],
                call.output_tokens,
                got["device"],
                got["host"],
                seconds,
                got["replica"],
            )
        )
        self._calls += 1
        self._prompt += got["prompt"]
        self._device += got["device"]
        self._host += got["host"]
        self._computed[got["replica"]] += computed
        return str(got["replica"])

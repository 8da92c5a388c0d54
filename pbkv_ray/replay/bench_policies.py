"""`pbkv bench policies`: a trace on the real engine, one policy after the other, in interleaved blocks.

Real scheduler, real HiCache, a random-weight model; closed loop. The runs are cut into blocks; in every block each
policy starts from an empty cache and runs the same runs, and the order of the policies rotates from block to block,
so that what the machine does meanwhile is spread over all of them.
"""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from scipy.stats import t as t_distribution

from pbkv_ray.config import EngineOptions
from pbkv_ray.core.actions import PublishForecast
from pbkv_ray.core.calls import Caller
from pbkv_ray.core.forecast import Forecast
from pbkv_ray.engine.measured import SWITCH
from pbkv_ray.engine.policies import STOCK
from pbkv_ray.engine.server import EngineServer
from pbkv_ray.errors import EngineError
from pbkv_ray.predict.counts import VariableOrderCounts
from pbkv_ray.replay.arrivals import ToolWaits, uniform
from pbkv_ray.replay.owned import true_forecast, with_noise
from pbkv_ray.replay.token_calls import serve_tokens
from pbkv_ray.replay.workload import TraceRun, Workload, prompt_tokens

HORIZON = 10
_OURS = "ours"


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """`engine.device_pool_tokens` and `context_length` are set from the workload. noise: lambda of paper Eq. 5."""

    engine: EngineOptions
    policies: tuple[str, ...]
    pool_fraction: float
    concurrency: int
    blocks: int = 2
    tools: ToolWaits = field(default_factory=lambda: ToolWaits(0.1, 0.5))
    noise: float = 0.0
    seed: int = 0


@dataclass(slots=True)
class Tally:
    """One policy's figures over all blocks."""

    prompt: int = 0
    device: int = 0
    host: int = 0
    run_s: list[float] = field(default_factory=list)
    ttft_s: list[float] = field(default_factory=list)
    wall_s: float = 0.0
    engine: dict[str, float] = field(default_factory=dict)
    cpu_us: list[float] = field(default_factory=list)  # of the scheduler, a prompt token, one per block
    prefetch: dict[str, int] = field(default_factory=dict)

    def add_engine(self, before: dict[str, Any], after: dict[str, Any], prompt: int) -> None:
        """What the engine counted in a block of `prompt` prompt tokens."""
        self.cpu_us.append(1e6 * (after.get("cpu_s", 0.0) - before.get("cpu_s", 0.0)) / max(1, prompt))
        for key, value in after.items():
            if key == "prefetch":
                for name, tokens in value.items():
                    self.prefetch[name] = self.prefetch.get(name, 0) + tokens
            else:
                # A policy is chosen with fresh counters, the rest counts since the engine started.
                fresh = key in ("partial", "fallbacks", "failures")
                self.engine[key] = self.engine.get(key, 0) + value - (0 if fresh else before.get(key, 0))

    def as_json(self) -> dict[str, Any]:
        busy = self.engine.get("prefill_s", 0.0) + self.engine.get("decode_s", 0.0)
        computed = self.prompt - self.device - self.host
        return {
            "device_hit": round(self.device / max(1, self.prompt), 4),
            "host_hit": round(self.host / max(1, self.prompt), 4),
            "run_seconds": spread(self.run_s),
            "ttft_seconds": spread(self.ttft_s),
            "prompt_tokens": self.prompt,
            "recomputed_tokens": computed,
            "prefetch": {f"{name}_tokens": self.prefetch.get(name, 0) for name in ("useful", "late", "wasted")},
            "evicted_tokens": int(self.engine.get("evicted_tokens", 0)),
            "evict_ms_mean": round(1e3 * self.engine.get("evict_s", 0) / max(1, self.engine.get("evictions", 0)), 4),
            "scheduler_cpu_s": round(self.engine.get("cpu_s", 0.0), 2),
            "prefill_share": round(self.engine.get("prefill_s", 0.0) / busy, 3) if busy else None,
            "fallbacks": int(self.engine.get("fallbacks", 0) + self.engine.get("failures", 0)),
            "wall_seconds": round(self.wall_s, 2),
        }


def spread(values: list[float]) -> dict[str, float]:
    if not values:
        return {"mean": 0.0, "p50": 0.0, "p99": 0.0}
    p50, p99 = np.percentile(values, [50, 99])
    return {"mean": round(float(np.mean(values)), 3), "p50": round(float(p50), 3), "p99": round(float(p99), 3)}


async def bench_policies(
    workload: Workload, train: Workload | None, options: BenchOptions, progress: Callable[[str], None]
) -> dict[str, Any]:
    """{"policies": {name: figures}, "setup": ...}; see `Tally.as_json`. Hits are tokens over prompt tokens."""
    os.environ[SWITCH] = "1"
    pool = workload.pool_tokens(options.pool_fraction, options.concurrency)
    longest = max(call.prompt_tokens + call.output_tokens for _, call in workload.calls())
    pool = max(pool, 2 * longest)  # one call must fit beside what it evicts
    tallies = {policy: Tally() for policy in options.policies}
    async with _engines(options, pool, longest) as engine_of:
        for block in range(options.blocks):
            runs = workload.runs[block :: options.blocks]
            turn = block % len(options.policies)
            for policy in (*options.policies[turn:], *options.policies[:turn]):
                server = await engine_of(policy)
                before, prompt = await _state(server), tallies[policy].prompt
                loop = ClosedLoop(server, policy, runs, train, options, tallies[policy])
                await loop.run()
                tallies[policy].add_engine(before, await _state(server), tallies[policy].prompt - prompt)
                figures = tallies[policy].as_json()
                progress(
                    f"block {block + 1}/{options.blocks} {policy:8} device {figures['device_hit']:.3f} "
                    f"host {figures['host_hit']:.3f} run {figures['run_seconds']['mean']:.1f} s"
                )
    busy = [(t.engine.get("prefill_s", 0.0), t.engine.get("decode_s", 0.0)) for t in tallies.values()]
    prefill, decode = (sum(part) for part in zip(*busy, strict=True))
    setup = {
        "trace": workload.name,
        "runs": len(workload),
        "calls": sum(len(run.calls) for run in workload.runs),
        "trained_on_runs": 0 if train is None else len(train),
        "concurrency": options.concurrency,
        "blocks": options.blocks,
        "pool_fraction": options.pool_fraction,
        "device_pool_tokens": pool,
        "host_ratio": options.engine.host_pool_ratio,
        "write_policy": options.engine.write_policy,
        "max_running": options.engine.max_running_requests,
        "noise": options.noise,
        "seed": options.seed,
        "prefill_share": round(prefill / (prefill + decode), 3) if prefill + decode else None,
    }
    first = tallies[options.policies[0]]
    return {
        "policies": {name: tally.as_json() for name, tally in tallies.items()},
        "scheduler_cpu_ratio": {name: paired_ratio(t.cpu_us, first.cpu_us) for name, t in tallies.items()},
        "setup": setup,
    }


def paired_ratio(ours: Sequence[float], theirs: Sequence[float]) -> dict[str, float] | None:
    """{"mean", "low", "high"}: geometric mean of the blocks' ratios and its 95 % interval (Student's t).

    None for less than three blocks, or where the scheduler reports no CPU time.
    """
    if len(ours) < 3 or min(*ours, *theirs) <= 0:
        return None
    logs = np.log(ours) - np.log(theirs)
    half = float(t_distribution.ppf(0.975, len(logs) - 1)) * float(logs.std(ddof=1)) / len(logs) ** 0.5
    mean = float(logs.mean())
    return {
        name: round(float(np.exp(x)), 4) for name, x in (("mean", mean), ("low", mean - half), ("high", mean + half))
    }


@asynccontextmanager
async def _engines(options: BenchOptions, pool: int, longest: int) -> AsyncIterator[Callable[[str], Any]]:
    """Policy -> a server that follows it, from an empty cache. Ours share one engine; stock ones have their own.

    A process has one engine at a time, so a change from one kind to another costs a start.
    """
    servers: dict[str, EngineServer] = {}

    async def engine_of(policy: str) -> EngineServer:
        key = policy if policy in STOCK else _OURS
        if key not in servers:
            while servers:
                await asyncio.to_thread(servers.popitem()[1].shutdown)
            made = replace(
                options.engine,
                policy=policy,
                device_pool_tokens=pool,
                context_length=longest + 64,
                extra={"sleep_on_idle": True, "skip_tokenizer_init": True, **options.engine.extra},
            )
            servers[key] = await asyncio.to_thread(EngineServer, made, replica=key)
        server = servers[key]
        if not (await server.manager.flush_cache(timeout_s=60.0)).success:
            raise EngineError(f"the engine of {key} is not idle between two blocks; nothing was measured")
        if policy not in STOCK:
            await server.choose_policy(policy)
        return server

    try:
        yield engine_of
    finally:
        for server in servers.values():
            await asyncio.to_thread(server.shutdown)


async def _state(server: EngineServer) -> dict[str, Any]:
    states: list[dict[str, Any]] = await server.manager.get_internal_state()
    return dict(states[0].get("pbkv", {}))


class ClosedLoop:
    """`concurrency` clients; each takes the next run when its last one has ended."""

    def __init__(
        self,
        server: EngineServer,
        policy: str,
        runs: tuple[TraceRun, ...],
        train: Workload | None,
        options: BenchOptions,
        tally: Tally,
    ) -> None:
        self._server, self._policy, self._options, self._tally = server, policy, options, tally
        self._queue = list(enumerate(runs))[::-1]
        self._vocabulary = int(server.manager.model_config.vocab_size)
        self._predictor = VariableOrderCounts()
        self._versions: dict[str, int] = {}
        for run in () if train is None else train.runs:
            for at, agent in enumerate(run.agents):
                self._predictor.observe(run.workflow, run.agents[:at], agent)
            self._predictor.observe(run.workflow, run.agents, None)

    async def run(self) -> None:
        started = time.perf_counter()
        ticker = asyncio.create_task(self._tick())
        async with asyncio.TaskGroup() as clients:
            for client in range(self._options.concurrency):
                clients.create_task(self._client(client))
        ticker.cancel()
        self._tally.wall_s += time.perf_counter() - started

    async def _tick(self) -> None:
        while True:
            self._server.tick()
            await asyncio.sleep(1.0)

    async def _client(self, client: int) -> None:
        await asyncio.sleep(2.0 * uniform(self._options.seed, "start", client))
        while self._queue:
            number, run = self._queue.pop()
            started = time.perf_counter()
            for at in range(len(run.calls)):
                if at:
                    await asyncio.sleep(self._options.tools.wait_s(run, at, self._options.seed))
                await self._call(run, at, number * 1_000 + at)
            self._tally.run_s.append(time.perf_counter() - started)
            self._predictor.observe(run.workflow, run.agents, None)
            await self._server.retire(self._name(run))

    def _name(self, run: TraceRun) -> str:
        return f"{self._policy}:{run.run_id}"

    async def _call(self, run: TraceRun, at: int, private: int) -> None:
        call, history = run.calls[at], run.agents[: at + 1]
        caller = Caller(self._name(run), run.workflow, call.agent, at)
        self._predictor.observe(run.workflow, history[:-1], history[-1])
        self._publish(caller.run_id, run, history)
        ids = prompt_tokens(call, self._vocabulary, private).tolist()
        session_id = caller.run_id if self._policy == "session" else None
        served = await serve_tokens(self._server.manager, ids, caller, call.output_tokens, session_id=session_id)
        self._tally.prompt += served.prompt
        self._tally.device += served.device
        self._tally.host += served.host
        self._tally.ttft_s.append(served.first_token_s)

    def _publish(self, run_id: str, run: TraceRun, history: tuple[str, ...]) -> None:
        forecast: Forecast | None
        if self._policy == "oracle":
            forecast = true_forecast(run.agents, len(history))
        else:
            forecast = self._predictor.forecast(run.workflow, history, HORIZON)
        if forecast is not None:
            if self._options.noise:
                forecast = with_noise(forecast, self._options.noise)
            self._server.publish(PublishForecast(run_id, len(history), forecast, time.time()))

"""`pbkv bench policies`: a trace on the real engine, one policy after the other, in interleaved blocks.

Real scheduler, real HiCache, a random-weight model; closed loop. The runs are cut into blocks; in every block each
policy starts from an empty cache and runs the same runs, and the order of the policies rotates from block to block,
so that what the machine does meanwhile is spread over all of them.
"""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from pbkv_ray.config import EngineOptions
from pbkv_ray.core.actions import PublishForecast
from pbkv_ray.core.calls import Caller
from pbkv_ray.core.events import CallFinished
from pbkv_ray.core.forecast import Forecast
from pbkv_ray.core.gate import Gate
from pbkv_ray.engine.measured import SWITCH
from pbkv_ray.engine.policies import STOCK
from pbkv_ray.engine.server import EngineServer
from pbkv_ray.errors import EngineError
from pbkv_ray.predict.counts import VariableOrderCounts
from pbkv_ray.replay.arrivals import ToolWaits, uniform
from pbkv_ray.replay.forecasts import true_forecast, with_noise
from pbkv_ray.replay.misled import Misled
from pbkv_ray.replay.tallies import Tally, paired_ratio
from pbkv_ray.replay.token_calls import serve_tokens
from pbkv_ray.replay.workload import TraceRun, Workload, prompt_tokens

HORIZON = 10
AUTO = "@auto"
_OURS = "ours"


def named(policy: str) -> str:
    """The policy alone, of NAME@auto."""
    return policy.removesuffix(AUTO)


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """`engine.device_pool_tokens` and `context_length` are set from the workload. noise: lambda of paper Eq. 5.

    policies: names; NAME@auto also has admission in service (`core.gate`) hold new runs back.
    """

    engine: EngineOptions
    policies: tuple[str, ...]
    pool_fraction: float
    concurrency: int
    blocks: int = 2
    tools: ToolWaits = field(default_factory=lambda: ToolWaits(0.1, 0.5))
    noise: float = 0.0
    misled: bool = False  # all forecasts are sure and wrong
    seed: int = 0


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
                server = await engine_of(named(policy))
                before, prompt = await _state(server), tallies[policy].prompt
                gate = Gate(pool) if policy.endswith(AUTO) else None
                loop = ClosedLoop(server, policy, runs, train, options, tallies[policy], gate)
                await loop.run()
                tallies[policy].add_engine(before, await _state(server), tallies[policy].prompt - prompt)
                figures = tallies[policy].as_json()
                progress(
                    f"block {block + 1}/{options.blocks} {policy:8} device {figures['device_hit']:.3f} "
                    f"host {figures['host_hit']:.3f} run {figures['run_seconds']['mean']:.1f} s "
                    f"done {figures['completion_seconds']['mean']:.1f} s"
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
        "misled": options.misled,
        "seed": options.seed,
        "prefill_share": round(prefill / (prefill + decode), 3) if prefill + decode else None,
    }
    first = tallies[options.policies[0]]
    return {
        "policies": {name: tally.as_json() for name, tally in tallies.items()},
        "scheduler_cpu_ratio": {name: paired_ratio(t.cpu_us, first.cpu_us) for name, t in tallies.items()},
        "setup": setup,
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
    """`concurrency` clients; each takes the next run when its last one has ended, and `gate` lets it begin."""

    def __init__(
        self,
        server: EngineServer,
        policy: str,
        runs: tuple[TraceRun, ...],
        train: Workload | None,
        options: BenchOptions,
        tally: Tally,
        gate: Gate | None = None,
    ) -> None:
        self._server, self._policy, self._options, self._tally = server, policy, options, tally
        self._gate, self._in_flight, self._news = gate, 0, asyncio.Event()
        self._queue = list(enumerate(runs))[::-1]
        self._vocabulary = int(server.manager.model_config.vocab_size)
        self._predictor = Misled() if options.misled else VariableOrderCounts()
        self._versions: dict[str, int] = {}
        for run in () if train is None else train.runs:
            for at in range(len(run.agents)):
                self._learn(run, at)
            self._learn(run, len(run.agents))

    async def run(self) -> None:
        self._began = started = time.perf_counter()
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
        while await self._admitted():
            number, run = self._queue.pop()
            self._in_flight += 1
            started = time.perf_counter()
            for at in range(len(run.calls)):
                if at:
                    await asyncio.sleep(self._options.tools.wait_s(run, at, self._options.seed))
                await self._call(run, at, number * 1_000 + at)
            self._tally.run_s.append(time.perf_counter() - started)
            self._tally.done_s.append(time.perf_counter() - self._began)
            self._in_flight -= 1
            if self._gate is not None:
                self._gate.ended(self._name(run))
            self._news.set()
            self._learn(run, len(run.agents))
            await self._server.retire(self._name(run))

    async def _admitted(self) -> bool:
        """Waits until one more run may begin; False if none is left."""
        while self._gate is not None and self._queue and self._gate.held(self._in_flight):
            self._news.clear()
            await self._news.wait()
        return bool(self._queue)

    def _name(self, run: TraceRun) -> str:
        return f"{self._policy}:{run.run_id}"

    async def _call(self, run: TraceRun, at: int, private: int) -> None:
        call, history = run.calls[at], run.agents[: at + 1]
        caller = Caller(self._name(run), run.workflow, call.agent, at)
        self._learn(run, at)
        self._publish(caller.run_id, run, history)
        began_s = time.time()
        ids = prompt_tokens(call, self._vocabulary, private).tolist()
        session_id = caller.run_id if named(self._policy) == "session" else None
        served = await serve_tokens(self._server.manager, ids, caller, call.output_tokens, session_id=session_id)
        self._tally.prompt += served.prompt
        self._tally.device += served.device
        self._tally.host += served.host
        self._tally.ttft_s.append(served.first_token_s)
        self._publish(caller.run_id, run, history, answered=call.output_tokens, made_s=began_s)
        if self._gate is not None:
            self._gate.called(
                CallFinished(
                    caller.run_id,
                    call.agent,
                    at,
                    str(private),
                    time.time(),
                    "stop",
                    served.prompt,
                    call.output_tokens,
                    served.device,
                    served.host,
                    first_token_s=served.first_token_s,
                )
            )
            self._news.set()

    def _learn(self, run: TraceRun, calls: int) -> None:
        """After so many calls the run went on with its next one, or ended."""
        following = run.agents[calls] if calls < len(run.agents) else None
        lengths = [call.output_tokens for call in run.calls[:calls]]
        self._predictor.observe(run.workflow, run.agents[:calls], following, answers=lengths)

    def _publish(
        self,
        run_id: str,
        run: TraceRun,
        history: tuple[str, ...],
        answered: int | None = None,
        made_s: float | None = None,
    ) -> None:
        """At the start of the last call of `history`, and once more when it is `answered` with so many tokens."""
        forecast: Forecast | None
        if named(self._policy) == "oracle":
            forecast = true_forecast(run.agents, len(history))
        else:
            forecast = self._predictor.forecast(run.workflow, history, HORIZON)
            if forecast is not None and answered is not None:
                forecast = self._predictor.refined(run.workflow, history[-1], answered, forecast)
        if forecast is not None:
            if self._options.noise:
                forecast = with_noise(forecast, self._options.noise)
            version = 2 * len(history) + (answered is not None)
            at_s = time.time() if made_s is None else made_s
            self._server.publish(PublishForecast(run_id, version, forecast, at_s))

"""`pbkv bench overhead`: what our stack adds to one LLM call, over the same call on the bare SGLang engine.

Bare calls are made inside the replica, on the engine's own `async_generate`; ours go through a Serve handle,
`HandleTransport` and `EngineServer`, as an agent's do. They alternate in one run, with prompts of equal length that
share no prefix, so that noise of the machine falls on both. The ratio is of latencies, from call to last token.
"""

import asyncio
import uuid
from collections.abc import Callable, Coroutine
from time import perf_counter
from typing import Any

import numpy as np
import ray
from ray import serve

from deployments.app import start_ray
from deployments.engine import EngineDeploymentOptions, EngineReplica, serve_options
from deployments.transport import HandleTransport
from pbkv_ray.config import EngineOptions
from pbkv_ray.core.calls import Call, Caller, Message
from pbkv_ray.engine.models import cache_dir, resolve_model, tiny_model

APPLICATION = "pbkv-bench"


class BareReplica(EngineReplica):
    """A replica that can also be asked for a bare call."""

    async def bare(self, text: str, output_tokens: int) -> float:
        """Seconds of `sglang.Engine.async_generate`, streamed, on the same text after the same chat template."""
        tokenizer = self.server.manager.tokenizer
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
        )
        parameters = {"max_new_tokens": output_tokens, "temperature": 0.0}
        started_s = perf_counter()
        stream = await self.server.engine.async_generate(prompt=prompt, sampling_params=parameters, stream=True)
        async for _ in stream:
            pass
        return perf_counter() - started_s


def measure(model: str, calls: int, words: int, output_tokens: int, progress: Callable[[int], None]) -> dict[str, Any]:
    """{"bare_ms": {"p50", "p99"}, "ours_ms": {...}, "ratio": {...}, "added_ms": {...}, "setup": {...}}"""
    folder = str(tiny_model(cache_dir() / "models" / "tiny-random-weight-bench")) if model == "tiny" else model
    options = EngineOptions(resolve_model(folder), device_pool_tokens=16_384)
    start_ray(2)
    try:
        replica = serve.deployment(BareReplica, name="Engine", **serve_options(options, EngineDeploymentOptions()))
        serve.start(proxy_location="Disabled")  # else its proxy shares port 8000 with whoever serves there
        handle = serve.run(replica.bind(options), name=APPLICATION, route_prefix=None)
        return asyncio.run(_alternate(handle, calls, words, output_tokens, progress)) | {
            "setup": {"model": model, "calls": calls, "prompt_words": words, "output_tokens": output_tokens}
        }
    finally:
        serve.shutdown()
        ray.shutdown()


async def _alternate(
    handle: Any, calls: int, words: int, output_tokens: int, progress: Callable[[int], None]
) -> dict[str, Any]:
    transport = HandleTransport(handle)

    async def ours(text: str) -> float:
        caller = Caller("bench", "bench", "bench", 0)
        call = Call(uuid.uuid4().hex, caller, (Message("user", text),), max_tokens=output_tokens)
        started_s = perf_counter()
        async for _ in transport.stream(call):
            pass
        return perf_counter() - started_s

    async def bare(text: str) -> float:
        seconds: float = await handle.bare.remote(text, output_tokens)
        return seconds

    ways: dict[str, Callable[[str], Coroutine[Any, Any, float]]] = {"bare": bare, "ours": ours}
    seconds: dict[str, list[float]] = {"bare": [], "ours": []}
    for number in range(-3, calls):  # the first three warm both ways up
        for name, way in sorted(ways.items(), reverse=bool(number % 2)):
            took_s = await way(" ".join(f"{name}{number}w{word}" for word in range(words)))
            if number >= 0:
                seconds[name].append(took_s)
        progress(number)
    bare_ms, ours_ms = (1_000 * np.asarray(seconds[name]) for name in ("bare", "ours"))
    at = {"p50": 50, "p99": 99}
    result = {
        "bare_ms": {name: float(np.percentile(bare_ms, q)) for name, q in at.items()},
        "ours_ms": {name: float(np.percentile(ours_ms, q)) for name, q in at.items()},
    }
    return result | {
        "ratio": {name: result["ours_ms"][name] / result["bare_ms"][name] for name in at},
        "added_ms": {name: result["ours_ms"][name] - result["bare_ms"][name] for name in at},
    }

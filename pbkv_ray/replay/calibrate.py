"""Fits a cost model to a real engine on this machine: `pbkv replay calibrate`."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from pbkv_ray.config import EngineOptions
from pbkv_ray.errors import EngineError
from pbkv_ray.replay.cost import Cost
from pbkv_ray.replay.workload import block_tokens

Array = npt.NDArray[np.float64]
NEW = (64, 256, 1024, 2048)
DEPTH = (0, 2048, 4096)
BATCH = (1, 4, 8)
CONTEXT = (64, 1024, 3072)
STEPS = 16
# The host tier of a CPU engine is memory of the same kind: a copy that is never what a batch waits for.
CPU_TRANSFER_TOKENS_S = 1e9


def calibrate(
    options: EngineOptions, model_path: str, accelerator: bool, repeats: int = 3, say: Callable[[str], None] = print
) -> tuple[Cost, dict[str, Any]]:
    """(cost, the measurements behind it). Starts an engine and ends it. Take it on an idle machine: every figure is
    the least of `repeats`, which removes short disturbances only. Raises EngineError when the engine fails.
    """
    import sglang

    from pbkv_ray.engine.arguments import engine_arguments

    wanted = replace(options, policy="lru", host_pool_ratio=0.0)
    engine = sglang.Engine(**engine_arguments(wanted, model_path, accelerator))
    try:
        timer = _Timer(engine, repeats)
        prefill = [(n, depth, timer.prefill(n, depth)) for depth in DEPTH for n in NEW]
        for n, depth, seconds in prefill:
            say(f"prefill of {n} tokens behind {depth}: {seconds * 1e3:.1f} ms")
        decode = [(b, c, timer.decode_step(b, c)) for c in CONTEXT for b in BATCH]
        for batch, context, seconds in decode:
            say(f"decode step of {batch} x {context} tokens: {seconds * 1e3:.1f} ms")
    except Exception as error:
        raise EngineError(f"the engine failed while it was measured: {error}") from error
    finally:
        engine.shutdown()
    return fit(options.model, prefill, decode), {"prefill": prefill, "decode": decode}


def fit(name: str, prefill: Sequence[tuple[int, int, float]], decode: Sequence[tuple[int, int, float]]) -> Cost:
    """Least squares of the cost model's own terms, none of them negative, relative errors weighing alike."""
    a, b, c = _least_squares([(1.0, n, n * (depth + n / 2)) for n, depth, _ in prefill], [s for *_, s in prefill])
    d, e, f = _least_squares([(1.0, batch, batch * ctx) for batch, ctx, _ in decode], [s for *_, s in decode])
    return Cost(f"calibrated/{name}", a, b, c, 0.0, d, e, f, CPU_TRANSFER_TOKENS_S)


def _least_squares(rows: Sequence[tuple[float, ...]], seconds: Sequence[float]) -> list[float]:
    measured = np.array(seconds)
    terms = np.array(rows, np.float64) / measured[:, None]
    kept = list(range(terms.shape[1]))
    while kept:
        found, *_ = np.linalg.lstsq(terms[:, kept], np.ones(len(measured)), rcond=None)
        if found.min() >= 0:
            break
        kept.pop(int(found.argmin()))
    result = np.zeros(terms.shape[1])
    result[kept] = found if kept else 0.0
    return [float(value) for value in result]


class _Timer:
    """Times generate calls. Every measurement uses new tokens, so that only the depth asked for is cached."""

    def __init__(self, engine: Any, repeats: int) -> None:
        self._engine, self._repeats, self._fresh = engine, repeats, 0

    def prefill(self, new: int, depth: int) -> float:
        return min(self._prefill(new, depth) for _ in range(self._repeats))

    def _prefill(self, new: int, depth: int) -> float:
        prefix = self._tokens(depth)
        if prefix:
            self._generate([prefix], 1)
        return self._generate([prefix + self._tokens(new)], 1)

    def decode_step(self, batch: int, context: int) -> float:
        """Cached prompts: what 1 + STEPS tokens take longer than one token."""
        best = np.inf
        for _ in range(self._repeats):
            prompts = [self._tokens(context) for _ in range(batch)]
            self._generate(prompts, 1)
            once = self._generate(prompts, 1)
            best = min(best, (self._generate(prompts, 1 + STEPS) - once) / STEPS)
        return max(1e-6, float(best))

    def _tokens(self, count: int) -> list[int]:
        blocks = -(-count // 16)
        self._fresh += blocks
        ids = np.arange(self._fresh - blocks, self._fresh, dtype=np.int64)
        return [int(token) for token in block_tokens(ids, 256)[:count]]

    def _generate(self, prompts: list[list[int]], tokens: int) -> float:
        parameters = {"max_new_tokens": tokens, "ignore_eos": True, "temperature": 0.0}
        began = time.perf_counter()
        self._engine.generate(input_ids=prompts, sampling_params=parameters)
        return time.perf_counter() - began

"""Where a scheduler's time goes, for benchmarks: with any cache, stock ones included. Off unless PBKV_MEASURE is set.

Read with `sglang`'s own `get_internal_state`, under the key "pbkv". Seconds and tokens since the engine started.
"""

import time
from collections import defaultdict
from typing import Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

SWITCH = "PBKV_MEASURE"
_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
_CACHE = "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache"

spent: defaultdict[str, float] = defaultdict(float)


def around_batch(run_batch: Any, scheduler: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
    started = time.perf_counter()
    try:
        return run_batch(scheduler, batch, *args, **kwargs)
    finally:
        kind = "prefill" if batch.forward_mode.is_extend() else "decode"
        spent[f"{kind}_s"] += time.perf_counter() - started
        spent[f"{kind}_batches"] += 1


def around_evict(evict: Any, cache: Any, *args: Any, **kwargs: Any) -> Any:
    started = time.perf_counter()
    result = evict(cache, *args, **kwargs)
    spent["evict_s"] += time.perf_counter() - started
    spent["evictions"] += 1
    spent["evicted_tokens"] += result.num_tokens_evicted
    return result


def after_state(output: Any, scheduler: Any, *args: Any) -> Any:
    cache = scheduler.tree_cache
    state: dict[str, Any] = {**spent, "cpu_s": time.process_time()}
    if hasattr(cache, "admit"):
        count = cache.tree_core.count
        state |= {"partial": count.partial, "fallbacks": count.fallbacks, "failures": count.failures}
        if cache.oversight is not None:
            state["guard_fallbacks"] = cache.oversight.guard.count.fallbacks
        done = getattr(cache.prefetcher, "count", None)
        state["prefetch"] = {} if done is None else {name: getattr(done, name) for name in done.__slots__}
    output.internal_state["pbkv"] = state
    return output


def register() -> None:
    HookRegistry.register(f"{_SCHEDULER}.run_batch", around_batch, HookType.AROUND)
    HookRegistry.register(f"{_SCHEDULER}.get_internal_state", after_state, HookType.AFTER)
    HookRegistry.register(f"{_CACHE}._evict", around_evict, HookType.AROUND)

"""`pbkv bench evict`: what one eviction costs, ours against SGLang's Python and Rust cores, in one run.

50,000 leaves in 500 owner sets on the real cache object; 1,000 evictions of one page. Before each of ours a run's
forecast changes, as a hint brings it to the scheduler: that costs "hint_p50_ms", between two batches. Whatever
re-scoring is still due when the victim is wanted is part of the eviction.
"""

import gc
import time
from array import array
from collections.abc import Callable
from typing import Any

import numpy as np

from pbkv_ray.core.forecast import Forecast
from pbkv_ray.core.reuse import Tier
from pbkv_ray.replay.bare_cache import BareCache

_ROUND = 500  # evictions of one cache in a row
_LEAF = 4  # tokens of a leaf, the only ones that its set does not share
_AGENTS = ("planner", "coder", "tester", "reviewer")
CACHES = {"pbkv": ("pbkv+", "python"), "python_lru": ("lru", "python"), "rust_lru": ("lru", "rust")}


def bench_evict(leaves: int = 50_000, sets: int = 500, evictions: int = 1_000) -> dict[str, Any]:
    """{"pbkv" | "python_lru" | "rust_lru": {"p50_ms", "p99_ms", "mean_ms", "cpu_p50_ms", "cpu_p99_ms"}, "setup": ...}.

    Wall-clock milliseconds, and those that the thread had a CPU: on a busy machine the two part. The caches take
    turns, a round each, so that whatever else the machine does hits all three alike; turns of one eviction would
    measure how much of the processor's cache the Python core's heap of 50,000 leaves has emptied for the other two.
    """
    caches = {name: _fill(*CACHES[name], leaves, sets) for name in CACHES}
    change = _changes(caches["pbkv"], sets)
    gc.collect()
    gc.freeze()  # as SGLang's own /freeze_gc does once a server is warm
    spent: dict[str, list[tuple[float, float]]] = {name: [] for name in caches}
    hints: list[tuple[float, float]] = []
    for first in range(0, evictions, _ROUND):
        for name, bare in caches.items():
            for turn in range(first, min(first + _ROUND, evictions)):
                if name == "pbkv":
                    hints.append(_timed(lambda: change(turn))[0])  # noqa: B023  (called at once)
                seconds, freed = _timed(lambda: bare.evict(1))  # noqa: B023
                spent[name].append(seconds)
                assert freed in (1, _LEAF), f"{name} freed {freed} tokens, not a leaf of {_LEAF} or a beginning of 1"
    gc.unfreeze()
    count = caches["pbkv"].cache.tree_core.count
    assert not count.fallbacks and not count.failures, f"the index failed: {count}"
    setup = {"leaves": leaves, "owner_sets": sets, "evictions": evictions, "page_tokens": 1, "leaf_tokens": _LEAF}
    result: dict[str, Any] = {name: _summary(seconds) for name, seconds in spent.items()}
    result["pbkv"] |= {f"hint_{name}": value for name, value in _summary(hints).items()}
    return result | {"setup": setup}


def _timed(act: Callable[[], Any]) -> tuple[tuple[float, float], Any]:
    """Seconds on the wall, seconds on a CPU, and what came of it."""
    wall, cpu = time.perf_counter(), time.thread_time()
    result = act()
    return (time.perf_counter() - wall, time.thread_time() - cpu), result


def _summary(seconds: list[tuple[float, float]]) -> dict[str, float]:
    wall, cpu = (np.array(seconds) * 1e3).T
    return {
        "p50_ms": round(float(np.percentile(wall, 50)), 4),
        "p99_ms": round(float(np.percentile(wall, 99)), 4),
        "mean_ms": round(float(wall.mean()), 4),
        "cpu_p50_ms": round(float(np.percentile(cpu, 50)), 4),
        "cpu_p99_ms": round(float(np.percentile(cpu, 99)), 4),
    }


def _fill(policy: str, core: str, leaves: int, sets: int) -> BareCache:
    """A full cache: every set is one run's private beginning with its leaves below."""
    from sglang.srt.mem_cache.base_prefix_cache import InsertParams
    from sglang.srt.mem_cache.radix_cache import RadixKey

    bare = BareCache(policy, leaves * _LEAF + sets, core=core)
    slots = bare.allocator.alloc(leaves * _LEAF + sets)
    owned = hasattr(bare.cache, "admit")
    at = 0
    for leaf in range(leaves):
        owner = leaf % sets
        key = [owner, *range(sets + leaf * _LEAF, sets + (leaf + 1) * _LEAF)]
        new = leaf < sets
        value = slots[at : at + _LEAF + 1] if new else slots[at - 1 : at + _LEAF]
        result = bare.cache.insert(
            InsertParams(key=RadixKey(array("q", key)), value=value, prev_prefix_len=0 if new else 1)
        )
        at += _LEAF + new
        if owned:
            node = bare.cache.tree_core.node_by_id(result.last_device_node)
            bare.index.use(node, f"run{owner}", _AGENTS[owner % len(_AGENTS)])
    return bare


def _changes(bare: BareCache, sets: int) -> Callable[[int], None]:
    rng = np.random.default_rng(0)

    def change(turn: int) -> None:
        run = int(rng.integers(sets))
        step = rng.dirichlet(np.ones(len(_AGENTS) + 1), size=10)
        bare.index.update(f"run{run}", Forecast(_AGENTS, step), version=turn, at_s=turn * 0.01)
        bare.index.peek(Tier.DEVICE)  # as scheduler.apply_hints does

    for run in range(sets):
        bare.index.update(
            f"run{run}", Forecast(_AGENTS, rng.dirichlet(np.ones(len(_AGENTS) + 1), size=10)), version=-1, at_s=0.0
        )
    return change

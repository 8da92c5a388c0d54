"""Carries out `core.prefetch`'s plans in the scheduler: host to device, while a batch only decodes.

SGLang loads from the host for requests, and starts queued loads with prefill batches only. Here `load_back` is called
without a request, and started at once. It makes room by itself if it must, so room is made before: of free and
retired space, never of active nodes.

A load is no request's, so no forward waits for it. Whatever runs next might already read what it brings: the forward
stream waits for its end before the next batch, which costs nothing once it has ended (a plan fits one decode step).
"""

import time
from typing import Any

import torch
from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeNode

from pbkv_ray.core.prefetch import Load, Prefetcher, PrefetchOptions
from pbkv_ray.engine.tree_core import OwnedTreeCore


class EnginePrefetcher:
    """One rank's prefetch. Ranks plan alike: same index, same allocator, and measurements that they agree on."""

    def __init__(self, cache: Any, aggressive_share: float = 0.0) -> None:
        self._cache = cache
        self._core: OwnedTreeCore = cache.tree_core
        self._plan: Prefetcher[UnifiedTreeNode] = Prefetcher(
            self._core.index, PrefetchOptions(aggressive=aggressive_share)
        )
        self._core.left_device.append(self._plan.left)
        self._aggressive = aggressive_share > 0
        self._loading: dict[int, Load[UnifiedTreeNode]] = {}  # anchor node id -> load
        self._unfenced: list[Any] = []  # ends of transfers that no forward has waited for yet
        self._decoding_since: float | None = None

    @property
    def count(self) -> Any:
        return self._plan.count

    def before(self, batch: Any, forward_stream: Any) -> None:
        """The scheduler is about to run `batch` (None: nothing). Called once for every plan of it."""
        now = time.perf_counter()
        if self._decoding_since is not None:
            self._plan.decoded(self._agreed(now - self._decoding_since))
            self._decoding_since = None
        self._settle()
        if batch is None:
            return
        for finished in self._unfenced:
            if not finished.query():
                forward_stream.wait_event(finished)
        self._unfenced.clear()
        if batch.forward_mode.is_decode():
            self._decoding_since = now
            self._load(reserve=2 * self._cache.page_size * len(batch.reqs))

    def reset(self) -> None:
        """The cache was emptied."""
        self._loading.clear()
        self._unfenced.clear()
        self._decoding_since = None
        self._plan.clear()

    def finish(self) -> None:
        """Another will take its place: no forward may run before what is on its way has arrived."""
        for finished in self._unfenced:
            finished.synchronize()
        self.reset()

    def used(self, node: UnifiedTreeNode | None) -> None:
        """A request's prompt ends in `node`."""
        while node is not None and node is not self._core.root_node:
            self._plan.used(node)
            node = node.parent

    def _settle(self) -> None:
        ongoing = self._cache.ongoing_load_back
        for anchor in [anchor for anchor in self._loading if anchor not in ongoing]:
            for node in self._loading.pop(anchor).path:
                self._plan.arrived(node)

    def _load(self, reserve: int) -> None:
        cache = self._cache
        if self._loading or not self._core.trusted or self._core.by_lru() or not cache.has_free_load_back_slot():
            return
        if not self._core.demoted:
            self._plan.nothing()
            return
        allocator = cache.token_to_kv_pool_allocator
        loads = self._plan.plan(max(0, allocator.available_size() - reserve), allocator.size)
        started = [load for load in loads if self._queue(load)]
        if not started:
            return
        begun = time.perf_counter()
        cache.ready_to_load_host_cache()
        ack = cache.cache_controller.ack_load_queue[-1]
        if ack.finish_event.query():  # on a CPU the copy is done; on a GPU SGLang's ack brings its time
            tokens = sum(load.tokens for load in started)
            self._plan.transferred(tokens, self._agreed(time.perf_counter() - begun))
        self._unfenced.append(ack.finish_event)

    def _queue(self, load: Load[UnifiedTreeNode]) -> bool:
        cache, allocator = self._cache, self._cache.token_to_kv_pool_allocator
        short = load.tokens - allocator.available_size()
        if short > 0:
            cache.make_room(short, retired_only=not self._aggressive)
        if (
            load.node.id not in self._core._node_arena
            or allocator.available_size() < load.tokens
            or not cache.load_back(load.node.id)
        ):
            self._plan.failed(load)
            return False
        self._loading[load.node.id] = load
        return True

    def finished(self, ack: Any) -> None:
        """SGLang has seen a transfer end; on a GPU its events carry how long it took."""
        if ack.timing_enabled and ack.num_tokens:
            seconds = ack.start_event.elapsed_time(ack.finish_event) / 1e3
            self._plan.transferred(ack.num_tokens, self._agreed(seconds))

    def _agreed(self, seconds: float) -> float:
        """The slowest rank's measurement: a budget of each rank's own would part their trees."""
        if self._cache.tp_world_size > 1:
            slowest = torch.tensor([-seconds], dtype=torch.float64)
            self._cache._all_reduce(slowest, torch.distributed.ReduceOp.MIN)
            return -float(slowest.item())
        return seconds

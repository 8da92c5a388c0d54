"""SGLang's own radix cache without an engine: the scheduler's side of a request, on pools without KV data.

Real: UnifiedRadixCache with the tree core and components that the engine would use (stock or our plug-in's),
ReqToTokenPool, the token allocator, and with a host tier also HiCache's pools and controller on one-byte KV
entries. Ours: the request object (the attributes of SGLang's Req that a tree reads) and the order of calls that
the scheduler makes (match, lock, load back, evict, allocate, checkpoint, release).

One key element is one *unit*: one token, or one whole block of 16 tokens when a replay is coarsened. A coarsened
tree is a tree of page size 16 whose pages are compared by id, sixteen times cheaper.
"""

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from pbkv_ray.engine.cpu_platform import has_accelerator, select_platform
from pbkv_ray.errors import ConfigError


@dataclass(frozen=True, slots=True)
class TreeOptions:
    """Sizes in units. `host_units` 0 leaves the host tier out. `cache_class` and `overrides` are the plug-in's."""

    device_units: int
    host_units: int = 0
    max_requests: int = 256
    max_context_units: int = 1 << 16
    eviction_policy: str = "lru"
    eviction_config: dict[str, Any] | None = None
    tree_core: str = "rust"
    write_policy: str = "write_through"
    session_aware: bool = False
    cache_class: type[Any] | None = None
    prepare: Callable[[Any], None] | None = None  # gets CacheInitParams before the cache is made
    on_first_slot: "Callable[[Any, TreeRequest], None] | None" = None  # (cache, request): it joined its first batch


class TreeRequest:
    """What UnifiedRadixCache reads and writes of SGLang's Req. Ids are units.

    `tail`: the prompt has tokens behind its units (a coarse tree leaves its last, partial block out). Without a
    tail the last unit is always computed, as in SGLang: the first output token needs it.
    """

    def __init__(
        self,
        rid: str,
        prompt: "array[int]",
        custom: dict[str, Any],
        session: str | None = None,
        tail: bool = False,
    ) -> None:
        from sglang.srt.managers.schedule_batch import ReqKvInfo

        self.rid = rid
        self.origin_input_ids = prompt
        self.full_untruncated_fill_ids = prompt
        self.sampling_params = SimpleNamespace(custom_params=custom)
        self.match_limit = len(prompt) if tail else max(0, len(prompt) - 1)
        self.session_id = session
        self.session_generation: int | None = None
        self.session = None
        self.kv = ReqKvInfo()
        self.priority = 0
        self.extra_key = self.cache_salt = self.kv_rotation_base = None
        self.swa_host_hit_length = self.mamba_host_hit_length = 0
        self.last_node: Any = None
        self.best_match_node: Any = None
        self.host_hit_length = 0
        self.lock: Any = None
        self.done = False
        self.batched = False
        self.finished_reason = None
        self.allocated = 0  # units that have a slot: matched, loaded or computed
        self.device_hit = self.host_hit = 0

    def finished(self) -> bool:
        return self.done

    @property
    def cached_tokens_device(self) -> int:
        """SGLang's name for what a request found on the device."""
        return self.device_hit


class Tree:
    """One replica's cache. Raises ConfigError for sizes that SGLang cannot take."""

    def __init__(self, options: TreeOptions) -> None:
        import os

        select_platform(os.environ, has_accelerator())
        import torch
        from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator
        from sglang.srt.mem_cache.cache_init_params import CacheInitParams
        from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
        from sglang.srt.mem_cache.unified_cache.components import ComponentType
        from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

        if options.device_units < 1:
            raise ConfigError(f"a device pool of {options.device_units} units holds nothing; raise the fraction")
        self.options = options
        self._rows = ReqToTokenPool(options.max_requests, options.max_context_units, "cpu", False)
        kv = _tiny_pool(options.device_units) if options.host_units else None
        self._slots = TokenToKVPoolAllocator(options.device_units, torch.uint8, "cpu", kv, False)
        params = CacheInitParams(
            disable=False,
            req_to_token_pool=self._rows,
            token_to_kv_pool_allocator=self._slots,
            page_size=1,
            eviction_policy=options.eviction_policy,
            eviction_policy_config=options.eviction_config,
            enable_session_radix_cache=options.session_aware,
            tree_components=(ComponentType.FULL,),
            tree_core_backend=options.tree_core,
        )
        if options.prepare is not None:
            options.prepare(params)
        self.cache: Any = (options.cache_class or UnifiedRadixCache)(params)
        if options.host_units:
            _attach_host(self.cache, params, options)
        self.evicted_units = 0

    # The life of a request, in the order in which the scheduler makes these calls.

    def match(self, request: TreeRequest) -> tuple[int, int]:
        """(device units, host units) that the prompt finds."""
        from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
        from sglang.srt.mem_cache.radix_cache import RadixKey

        key = RadixKey(request.origin_input_ids, limit=request.match_limit)
        found = self.cache.match_prefix(MatchPrefixParams(key=key, req=request))
        request.last_node, request.best_match_node = found.last_device_node, found.best_match_node
        request.host_hit_length = found.host_hit_length
        return int(found.device_prefix_len), int(found.host_hit_length)

    def admit(self, request: TreeRequest) -> None:
        """Match, lock the path and load what the host has; sets the request's hits."""
        request.device_hit, _ = self.match(request)
        self._rows.alloc([request])
        request.lock = self.cache.lock(request.last_node)
        covered = request.device_hit
        if request.host_hit_length:
            from sglang.srt.mem_cache.base_prefix_cache import InitLoadBackParams

            params = InitLoadBackParams(request.best_match_node, request.host_hit_length, req=request)
            loaded, node = self.cache.init_load_back(params)
            if loaded:
                self.cache.unlock(request.lock)
                request.last_node, request.host_hit = node, loaded
                request.lock = self.cache.lock(node)
                covered += loaded
                self.cache.ready_to_load_host_cache()
                self.cache.loading_check()
        if covered:
            indices = self.cache.path_device_indices(request.last_node)[:covered]
            self._rows.write((request.kv.req_pool_idx, slice(0, covered)), indices)
        request.kv.cache_protected_len = covered
        request.allocated = covered

    def allocate(self, request: TreeRequest, units: int) -> bool:
        """Slots for `units` more of the request; evicts when the pool is short. False: they do not fit."""
        from sglang.srt.mem_cache.common import evict_from_tree_cache

        if units > 0:
            free = self._slots.available_size()
            if free < units:
                evict_from_tree_cache(self.cache, units)
                self.evicted_units += max(0, self._slots.available_size() - free)
            slots = self._slots.alloc(units)
            if slots is None:
                return False
            end = request.allocated + units
            self._rows.write((request.kv.req_pool_idx, slice(request.allocated, end)), slots)
            request.allocated = end
        if not request.batched and self.options.on_first_slot is not None:
            self.options.on_first_slot(self.cache, request)
        request.batched = True
        return True

    def checkpoint(self, request: TreeRequest) -> None:
        """Publish what is computed so far (a chunk of prefill)."""
        self.cache.checkpoint(request, up_to=min(request.allocated, len(request.full_untruncated_fill_ids)))
        self._poll_host()

    def append(self, request: TreeRequest, units: Sequence[int]) -> None:
        """Output that got a slot (see `allocate`) becomes part of what is published at the end."""
        request.full_untruncated_fill_ids = request.full_untruncated_fill_ids + array("q", units)

    def finish(self, request: TreeRequest, publish: bool = True) -> None:
        """End of the request: publish, unlock, free the row."""
        request.done = True
        if publish:
            self.cache.checkpoint(request, up_to=min(request.allocated, len(request.full_untruncated_fill_ids)))
        held = self._rows.req_to_token[request.kv.req_pool_idx, request.kv.cache_protected_len : request.allocated]
        self._slots.free(held.to(self._slots.free_pages.dtype))
        self.cache.unlock(request.lock)
        request.lock = None
        self._rows.free(request)
        self._poll_host()

    def _poll_host(self) -> None:
        if self.options.host_units:
            self.cache.check_hicache_events()

    def free_units(self) -> int:
        return int(self._slots.available_size())

    def evictable_units(self) -> int:
        return int(self.cache.evictable_size())


def _tiny_pool(units: int) -> Any:
    """A real MHA pool of one layer and one byte-sized head: HiCache then moves four bytes a unit."""
    import torch
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    return MHATokenToKVPool(
        size=units,
        page_size=1,
        dtype=torch.bfloat16,
        head_num=1,
        head_dim=1,
        layer_num=1,
        device="cpu",
        enable_memory_saver=False,
    )


def _attach_host(cache: Any, params: Any, options: TreeOptions) -> None:
    """HiCache as `create_unified_radix_cache` attaches it. Its pools read the process-wide server arguments while
    they are built, so these are published for that long (SGLang's own means for tests)."""
    from sglang.srt.platforms import current_platform
    from sglang.srt.runtime_context import get_context

    current_platform.init_backend()
    arguments = get_context().override_server_args(
        enable_hierarchical_cache=True,
        hicache_ratio=options.host_units / options.device_units,
        hicache_size=0,
        hicache_write_policy=options.write_policy,
        hicache_io_backend="direct",
        hicache_mem_layout="layer_first",
        page_size=1,
    )
    with arguments as published:
        cache.init_hicache(published, params)

"""SGLang's radix cache without an engine around it: the real cache, pools and host tier, and no model.

What `pbkv bench evict` and the tests of the plug-in drive. A call goes through the cache as the scheduler takes it:
match, load back from the host, lock, evict, allocate, insert, unlock.
"""

import os
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pbkv_ray.core.calls import Caller
from pbkv_ray.engine.cpu_platform import select_platform
from pbkv_ray.engine.policies import policy_arguments

select_platform(os.environ, accelerator=False)  # before the first import of SGLang


@dataclass(frozen=True, slots=True)
class Hit:
    """Prompt tokens that a call found in either tier."""

    device: int
    host: int


class BareCache:
    """One cache of `tokens` device slots. `core` names a stock tree core ("python", "rust") for policy `lru`.

    host_ratio: size of the host tier relative to the device's; 0: none.
    """

    def __init__(
        self,
        policy: str,
        tokens: int,
        *,
        core: str = "python",
        page_size: int = 1,
        host_ratio: float = 0.0,
        write_policy: str = "write_through",
        **switches: Any,
    ) -> None:
        import torch
        from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator
        from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
        from sglang.srt.mem_cache.cache_init_params import CacheInitParams
        from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
        from sglang.srt.mem_cache.unified_cache.components import ComponentType
        from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
        from sglang.srt.plugins import load_plugins
        from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

        load_plugins()
        arguments = policy_arguments(policy, **switches)
        server = ServerArgs(
            model_path="dummy",
            page_size=page_size,
            hicache_io_backend="direct",
            hicache_mem_layout="layer_first",
            hicache_write_policy=write_policy,
            hicache_ratio=host_ratio or 2.0,
        )
        set_global_server_args_for_scheduler(server)
        kv = MHATokenToKVPool(
            size=tokens,
            page_size=page_size,
            dtype=torch.float16,
            head_num=1,
            head_dim=2,
            layer_num=1,
            device="cpu",
            enable_memory_saver=False,
        )
        allocator = TokenToKVPoolAllocator if page_size == 1 else PagedTokenToKVPoolAllocator
        paged: dict[str, Any] = {} if page_size == 1 else {"page_size": page_size}
        self.allocator = allocator(size=tokens, dtype=torch.float16, device="cpu", kvcache=kv, need_sort=False, **paged)
        self.rows = ReqToTokenPool(size=64, max_context_len=tokens, device="cpu", enable_memory_saver=False)
        params = CacheInitParams(
            disable=False,
            req_to_token_pool=self.rows,
            token_to_kv_pool_allocator=self.allocator,
            page_size=page_size,
            tree_components=(ComponentType.FULL,),
            tree_core_backend=core,
            eviction_policy_config=arguments.get("radix_eviction_policy_config"),
            enable_session_radix_cache=policy == "session",
        )
        cache_class: Any = UnifiedRadixCache
        if arguments.get("radix_cache_backend"):
            from pbkv_ray.engine import radix

            radix.select(params)
            cache_class = radix.OwnedRadixCache
        self.cache = cache_class(params)
        if host_ratio:
            from pbkv_ray.engine.cpu_platform_class import PbkvCpuPlatform

            PbkvCpuPlatform().init_backend()
            self.cache.init_hicache(server, params)
            self.cache.load_back_threshold = 0
        if hasattr(self.cache, "attach"):
            self.cache.attach(0)
        self._calls = 0

    @property
    def index(self) -> Any:
        """The ReuseIndex of a policy of ours."""
        return self.cache.tree_core.index

    def call(self, caller: Caller | None, prompt: Sequence[int], output: Sequence[int] = ()) -> Hit:
        """One finished call, from its match to its last token in the tree."""
        req = self.begin(caller, prompt)
        hit = Hit(req.device_hit, req.host_hit)
        self.finish(req, output)
        return hit

    def begin(self, caller: Caller | None, prompt: Sequence[int]) -> Any:
        """A request whose prompt is computed and in the tree; it holds its path locked until `finish`."""
        from sglang.srt.managers.schedule_batch import Req
        from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InitLoadBackParams, MatchPrefixParams
        from sglang.srt.mem_cache.radix_cache import RadixKey
        from sglang.srt.sampling.sampling_params import SamplingParams

        from pbkv_ray.engine.hints import owner_params

        self._calls += 1
        req: Any = Req(
            rid=str(self._calls),
            origin_input_text="",
            origin_input_ids=array("q", prompt),
            sampling_params=SamplingParams(
                temperature=0, max_new_tokens=1, custom_params=None if caller is None else owner_params(caller)
            ),
            session_id=None if caller is None else caller.run_id,
        )
        if self.cache.enable_session_radix_cache and caller is not None:
            req.session_generation = self.cache.ensure_session_generation(caller.run_id)
        self.rows.alloc([req])
        match = self.cache.match_prefix(MatchPrefixParams(key=RadixKey(array("q", prompt[:-1])), req=req))
        req.prefix_len, req.last_node = match.device_prefix_len, match.last_device_node
        req.best_match_node, req.host_hit_length = match.best_match_node, match.host_hit_length
        req.device_hit, req.host_hit = match.device_prefix_len, 0
        req.cached_tokens_device = match.device_prefix_len
        if req.host_hit_length:
            req.host_hit, req.last_node = self.cache.init_load_back(
                InitLoadBackParams(best_match_node=req.best_match_node, host_hit_length=req.host_hit_length, req=req)
            )
            req.prefix_len += req.host_hit
            self.load()
        req.kv.cache_protected_len = req.prefix_len
        req.lock = self.cache.lock(req.last_node)
        if hasattr(self.cache, "admit"):
            self.cache.admit(req)
        row = req.kv.req_pool_idx
        self.rows.write((row, slice(0, req.prefix_len)), self.cache.prefix_device_indices(req))
        self._extend(req, req.prefix_len, len(prompt), EvictParams)
        req.full_untruncated_fill_ids = array("q", prompt)
        self.cache.checkpoint(req, up_to=len(prompt))
        self.settle()
        return req

    def finish(self, req: Any, output: Sequence[int] = ()) -> None:
        from sglang.srt.managers.schedule_batch import FINISH_LENGTH
        from sglang.srt.mem_cache.base_prefix_cache import EvictParams
        from sglang.srt.mem_cache.common import release_kv_cache

        prompt = len(req.origin_input_ids)
        req.output_ids = array("q", output)
        self._extend(req, prompt, prompt + len(output), EvictParams)
        req.finished_reason = FINISH_LENGTH(length=len(output))
        release_kv_cache(req, self.cache, checkpoint=True)
        self.settle()

    def end(self, run: str, at_s: float | None = None) -> None:
        """The run has ended, in the way that the policy takes it."""
        if hasattr(self.cache, "admit"):
            self.index.end(run, at_s)
        elif self.cache.enable_session_radix_cache:
            self.cache.release_radix_session(run)

    def evict(self, tokens: int) -> int:
        """Tokens that really went."""
        from sglang.srt.mem_cache.base_prefix_cache import EvictParams

        return int(self.cache.evict(EvictParams(num_tokens=tokens)).num_tokens_evicted)

    def load(self) -> None:
        """Carry out the queued transfers from the host."""
        self.cache.ready_to_load_host_cache()
        self.cache.loading_check()

    def settle(self) -> None:
        """Carry out the queued copies to the host."""
        if self.cache.cache_controller is not None:
            self.cache.flush_pending_backups()
            self.cache.writing_check()

    def _extend(self, req: Any, start: int, end: int, evict_params: Any) -> None:
        if end <= start:
            return
        page = self.cache.page_size
        start_page, need = -(-start // page) * page, 0
        need = max(0, -(-(end - start_page) // page) * page)
        short = need - self.allocator.available_size()
        if short > 0:
            self.cache.evict_for_alloc(evict_params(num_tokens=short))
        slots = self.allocator.alloc(need) if need else None
        row = self.rows.req_to_token[req.kv.req_pool_idx]
        if start_page > start:  # the rest of the page that the last token began
            last = int(row[start - 1])
            for at in range(start, min(start_page, end)):
                row[at] = last + 1 + at - start
        if need:
            if slots is None:
                raise MemoryError(f"{need} tokens do not fit: everything else is locked")
            self.rows.write((req.kv.req_pool_idx, slice(start_page, end)), slots[: end - start_page])
        req.kv.kv_committed_len = req.kv.kv_allocated_len = req.extend_end = end

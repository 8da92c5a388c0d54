"""The radix-cache backend `pbkv`: SGLang's cache, whose tree knows which run and agent used what.

    sglang.Engine(radix_cache_backend="pbkv", radix_eviction_policy_config={...RadixOptions...})

Seams, all SGLang's own: the radix-cache and tree-core registries, the component override, the plug-in hooks.
"""

from typing import Any

from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.mem_cache.registry import create_unified_radix_cache, register_radix_cache_backend
from sglang.srt.mem_cache.unified_cache.components import BASE_COMPONENT_TYPE as FULL
from sglang.srt.mem_cache.unified_cache.tree_core_registry import register_tree_core_backend
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from pbkv_ray.engine import scheduler
from pbkv_ray.engine.blocks import blocks_of
from pbkv_ray.engine.facts import FactsSender
from pbkv_ray.engine.hints import owner_of
from pbkv_ray.engine.misses import EngineMisses
from pbkv_ray.engine.oversight import Oversight
from pbkv_ray.engine.policies import BACKEND, RadixOptions
from pbkv_ray.engine.prefetcher import EnginePrefetcher
from pbkv_ray.engine.queue import Queue
from pbkv_ray.engine.tree_core import OwnedFullComponent, OwnedTreeCore

LRU = "lru"  # what an operator calls SGLang's own order


class OwnedRadixCache(UnifiedRadixCache):
    """SGLang's cache. A request's path gets its owner when it is admitted and when its tokens are inserted."""

    queue: Queue
    oversight: Oversight | None = None
    prefetcher: EnginePrefetcher | None = None
    facts: FactsSender | None = None
    misses: EngineMisses | None = None

    def attach(self, rank: int) -> None:
        """What works beside the tree; once the host tier is there, if there is to be one."""
        options = self.tree_core.options
        self.queue = Queue(self.tree_core)
        if options.prefetch and self.cache_controller is not None and self.pp_size == 1:
            self.prefetcher = EnginePrefetcher(self, options.aggressive_share)
        if options.facts and rank == 0 and self.pp_rank == 0 and self.facts is None:
            self.facts = FactsSender(options.facts)
        if self.facts is not None:
            self.misses = EngineMisses(self.facts, lambda: float(self.tree_core.index.owners.now_s))
            self.tree_core.evicted = self.misses.evicted

    def reset(self) -> None:
        super().reset()
        if self.prefetcher is not None:
            self.prefetcher.reset()
        if self.misses is not None:
            self.misses.clear()
        if self.oversight is not None:
            self.oversight.cleared()

    def choose(self, options: RadixOptions) -> None:
        """Another policy from now on, for benchmarks: the cache is emptied, what was learned of prompts stays."""
        self.tree_core.choose(options)
        self.prefetcher = self.oversight = None
        self.attach(0 if self.facts is not None else 1)

    def switch(self, policy: str) -> None:
        """Another policy from now on, while it serves: `lru` is SGLang's own. The cache keeps what it holds."""
        core = self.tree_core
        if policy not in (LRU, core.options.policy):
            kept = {name: getattr(core.options, name) for name in ("facts", "hidden_states", "shadow", "max_age_s")}
            if self.prefetcher is not None:
                self.prefetcher.finish()
            core.follow(RadixOptions.of(policy, **kept))
            self.prefetcher = None
            self.attach(0 if self.facts is not None else 1)
        self._overseer().order(policy == LRU)

    def _overseer(self) -> Oversight:
        """Made at first use: a replay puts an index of its own into the tree."""
        if self.oversight is None:
            core, size = self.tree_core, int(getattr(self.token_to_kv_pool_allocator, "size", 0))
            watches, guards = core.options.shadow != "off", core.options.shadow == "guard"
            tokens = core.index.owners.learned.block_tokens
            self.oversight = made = Oversight(size, tokens, shadow=watches, guards=guards)
            core.by_lru = lambda: made.by_lru
        return self.oversight

    def queued(self, req: Any) -> None:
        """The request has joined the scheduler's queue: its run's next use is as near as can be."""
        owner = owner_of(req)
        if owner is not None:
            core = self.tree_core
            core.tell(core.index.owners.waits_for, owner.run, owner.agent, owner.workflow)

    def admit(self, req: Any) -> None:
        """Once per request, when it joins a batch for the first time: a call of its owner begins."""
        core = self.tree_core
        owner = owner_of(req)
        if owner is not None:
            blocks = None
            if core.index.owners.score.learns or core.options.hidden_states:
                blocks = blocks_of(req, core.index.owners.learned.block_tokens)
            core.tell(core.index.call, owner.run, owner.agent, workflow=owner.workflow, blocks=blocks)
        # The best match includes the host tier, of which only a part may have been loaded.
        node = core._node_arena.get(req.best_match_node) or core._node_arena.get(req.last_node)
        if self.prefetcher is not None:
            core.tell(self.prefetcher.used, node)
        self._own(owner, node)
        if core.options.shadow != "off":
            self._overseer().admitted(req, req.cached_tokens_device)
        if self.misses is not None:
            self.misses.admitted(req, owner)

    def checkpoint_into_tree(self, req: Any, *, up_to: int, **kwargs: Any) -> None:
        super().checkpoint_into_tree(req, up_to=up_to, **kwargs)
        if not self.disable:
            self._own(owner_of(req), self.tree_core._node_arena.get(req.last_node))
            if self.oversight is not None:
                self.oversight.stored(req, up_to)

    def on_release(self, req: Any, *, checkpointed: bool) -> None:
        super().on_release(req, checkpointed=checkpointed)
        owner = owner_of(req) if req.finished() else None  # else it was retracted, and will go on
        if owner is not None:
            core = self.tree_core
            core.tell(core.index.answered, owner.run, core.index.owners.now_s)

    def _own(self, owner: Any, node: Any) -> None:
        core = self.tree_core
        if node is None or node is core.root_node:
            return
        if owner is None:
            core.tell(core.index.use, node, None)
        else:
            core.tell(core.index.use, node, owner.run, owner.agent, workflow=owner.workflow)

    def _evict(self, params: EvictParams, available_size_targets: Any = None, **kwargs: Any) -> Any:
        # An allocation walks until it is served, whatever it asked for: the request alone says how much is short.
        full = self.components[FULL]
        full.shortfall = params.num_tokens
        try:
            return super()._evict(params, available_size_targets, **kwargs)
        finally:
            full.shortfall = None

    def make_room(self, tokens: int, *, retired_only: bool) -> None:
        """Evict for a prefetch: by default nothing that a running run may still use."""
        full = self.components[FULL]
        full.retired_only = retired_only
        try:
            self.evict(EvictParams(num_tokens=tokens))
        finally:
            full.retired_only = False

    def loading_check(self, finish_count: int | None = None) -> None:
        if self.prefetcher is not None and finish_count:
            for ack in self.cache_controller.ack_load_queue[:finish_count]:
                self.prefetcher.finished(ack)
        super().loading_check(finish_count)


def select(params: Any) -> None:
    """Make SGLang's CacheInitParams ask for our tree core and our full-attention component."""
    params.tree_core_backend = BACKEND
    params.component_registry_override = {
        **(params.component_registry_override or {}),
        FULL: OwnedFullComponent,
    }


def build(ctx: Any) -> Any:
    """The factory that SGLang's registry calls, with its TreeCacheBuildContext."""
    select(ctx.params)
    cache = create_unified_radix_cache(ctx, cache_class=OwnedRadixCache)
    cache.attach(ctx.tp_rank)
    return cache


def register() -> None:
    """Called by `engine.plugin` in each of SGLang's processes."""
    register_tree_core_backend(BACKEND, OwnedTreeCore)
    register_radix_cache_backend(BACKEND, build)
    scheduler.register()

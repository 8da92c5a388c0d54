"""The radix-cache backend `pbkv`: tells SGLang's requests and runs to the ReuseIndex of its tree.

    sglang.Engine(radix_cache_backend="pbkv", radix_eviction_policy_config={...RadixOptions...})

Seams, all SGLang's own: the radix-cache and tree-core registries, the component override, the plug-in hooks.
"""

import logging
from typing import Any

from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.mem_cache.registry import create_unified_radix_cache, register_radix_cache_backend
from sglang.srt.mem_cache.unified_cache.components import BASE_COMPONENT_TYPE as FULL
from sglang.srt.mem_cache.unified_cache.tree_core_registry import register_tree_core_backend
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from pbkv_ray.core.ghost import block_hashes
from pbkv_ray.engine.hints import RPC, QuietPayloads, decode, owner_of
from pbkv_ray.engine.policies import BACKEND
from pbkv_ray.engine.tree_core import OwnedFullComponent, OwnedTreeCore

logger = logging.getLogger(__name__)
_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"


class OwnedRadixCache(UnifiedRadixCache):
    """SGLang's cache. A request's path gets its owner when it is admitted and when its tokens are inserted."""

    def admit(self, req: Any) -> None:
        """Once per request, when it joins a batch for the first time: a call of its owner begins."""
        core = self.tree_core
        owner = owner_of(req)
        if owner is not None:
            learned = core.index.owners.learned
            blocks = (
                block_hashes(req.origin_input_ids, learned.block_tokens) if core.index.owners.score.learns else None
            )
            core.tell(core.index.call, owner.run, owner.agent, workflow=owner.workflow, blocks=blocks)
        self._use(req, req.best_match_node if req.best_match_node is not None else req.last_node)

    def checkpoint_into_tree(self, req: Any, *, up_to: int, **kwargs: Any) -> None:
        super().checkpoint_into_tree(req, up_to=up_to, **kwargs)
        if not self.disable:
            self._use(req, req.last_node)

    def _use(self, req: Any, node_id: int) -> None:
        core = self.tree_core
        node = core._node_arena.get(node_id)
        if node is None or node is core.root_node:
            return
        owner = owner_of(req)
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
    return create_unified_radix_cache(ctx, cache_class=OwnedRadixCache)


def apply_hints(scheduler: Any, payload: str) -> None:
    """`Scheduler.pbkv_apply`: one broadcast of `engine.link`. Runs on every rank, between two batches."""
    cache = scheduler.tree_cache
    if not isinstance(cache, OwnedRadixCache):
        return
    core = cache.tree_core
    forecasts, ended, now_s = decode(payload)
    core.tell(core.index.tick, now_s)
    for hint in forecasts:
        core.tell(core.index.update, hint.run_id, hint.forecast, version=hint.version, at_s=hint.at_s)
    for run, at_s in ended.items():
        core.tell(core.index.end, run, at_s)


def after_plan(plan: Any, scheduler: Any, *args: Any, **kwargs: Any) -> None:
    """After `Scheduler.get_next_batch_to_run`: requests that run for the first time are tagged."""
    batch, cache = plan.batch_to_run, scheduler.tree_cache
    if batch is None or not isinstance(cache, OwnedRadixCache):
        return
    if batch.forward_mode.is_extend():
        for req in batch.reqs:
            if not hasattr(req, "pbkv_admitted"):
                req.pbkv_admitted = True
                cache.admit(req)


def register() -> None:
    """Called by `engine.plugin` in each of SGLang's processes."""
    register_tree_core_backend(BACKEND, OwnedTreeCore)
    register_radix_cache_backend(BACKEND, build)
    setattr(Scheduler, RPC, apply_hints)
    HookRegistry.register(f"{_SCHEDULER}.get_next_batch_to_run", after_plan, HookType.AFTER)
    logging.getLogger(Scheduler.__module__).addFilter(QuietPayloads())

"""What of ours runs inside SGLang's scheduler loop: hints in, admissions, prefetch, facts out. Hooks, no patches.

Every hook leaves a scheduler with another radix cache alone.
"""

import json
import logging
import os
from time import perf_counter
from typing import Any

import torch
from sglang.srt.managers.io_struct import RpcReqOutput
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from pbkv_ray.core.reuse import Tier
from pbkv_ray.engine import measured
from pbkv_ray.engine.hints import RPC, RPC_CHOOSE, QuietPayloads, decode, ordered_policy, owner_of
from pbkv_ray.engine.policies import RadixOptions
from pbkv_ray.engine.pools import pools
from pbkv_ray.errors import EngineError

logger = logging.getLogger(__name__)
_SCHEDULER = f"{Scheduler.__module__}.Scheduler"
_RESULTS = "sglang.srt.managers.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor"


def _ours(scheduler: Any) -> Any | None:
    cache = scheduler.tree_cache
    return cache if hasattr(cache, "admit") else None


def apply_hints(scheduler: Any, payload: str) -> None:
    """`Scheduler.pbkv_apply`: one broadcast of `engine.link`. Runs on every rank, between two batches."""
    cache = _ours(scheduler)
    if cache is None:
        return
    if (policy := ordered_policy(payload)) is not None:
        cache.switch(policy)
        return
    core = cache.tree_core
    forecasts, ended, now_s = decode(payload)
    core.tell(core.index.tick, now_s)
    for hint in forecasts:
        core.tell(core.index.update, hint.run_id, hint.forecast, version=hint.version, at_s=hint.at_s)
    for run, at_s in ended.items():
        core.tell(core.index.end, run, at_s)
    if not core.pressed():
        return
    try:
        core.index.peek(Tier.DEVICE)  # scores are brought up to date here, not while an eviction waits
    except Exception:
        logger.debug("scores failed; evictions fall back to LRU and count it", exc_info=True)


def around_rpc(handle: Any, scheduler: Any, request: Any) -> Any:
    """Around `Scheduler.handle_rpc_request`: a rank that is alone takes hints without SGLang's barrier of one, which
    costs it more than the hints."""
    if request.method != RPC or scheduler.tp_group.world_size > 1:
        return handle(scheduler, request)
    try:
        apply_hints(scheduler, **request.parameters)
    except Exception as error:
        logger.exception("hints that are none of ours")
        return RpcReqOutput(success=False, message=str(error))
    return RpcReqOutput(success=True, message="")


def choose_policy(scheduler: Any, payload: str) -> None:
    """`Scheduler.pbkv_choose`: RadixOptions as JSON. The engine must be idle; its cache is emptied.

    Raises EngineError, which SGLang passes on to the caller.
    """
    cache = _ours(scheduler)
    if cache is None or not scheduler.is_fully_idle():
        raise EngineError("the policy of an engine can be changed only while it is idle, and from one of ours")
    cache.choose(RadixOptions(**json.loads(payload)))
    scheduler.flush_cache()


def after_queue(done: Any, scheduler: Any, req: Any, *args: Any, **kwargs: Any) -> Any:
    """After `Scheduler._add_request_to_queue`."""
    cache = _ours(scheduler)
    if cache is not None and not hasattr(req, "pbkv_admitted"):  # a retracted request is queued again
        cache.queued(req)
    return done


def after_plan(plan: Any, scheduler: Any, *args: Any, **kwargs: Any) -> None:
    """After `Scheduler.get_next_batch_to_run`."""
    cache = _ours(scheduler)
    if cache is None:
        return
    batch = plan.batch_to_run
    prefills = batch is not None and batch.forward_mode.is_extend()
    cache.queue.pace.planned(int(batch.extend_num_tokens or 0) if prefills else 0, perf_counter())
    if prefills:
        for req in batch.reqs:
            if not hasattr(req, "pbkv_admitted"):  # chunks of a prompt and retracted requests come again
                req.pbkv_admitted = True
                cache.admit(req)
    if cache.prefetcher is not None:
        try:
            cache.prefetcher.before(batch, scheduler.forward_stream)
        except Exception:
            cache.prefetcher = None
            cache.tree_core.count.failures += 1
            logger.exception("prefetch failed and is off from now on")
    if cache.facts is not None and cache.facts.due():
        report(cache, cache.queue.waiting_tokens(scheduler))


def around_new_prefill(make: Any, scheduler: Any, *args: Any, **kwargs: Any) -> Any:
    """Around `Scheduler.get_new_batch_prefill`: siblings wait until the first of them has computed their prefix."""
    cache = _ours(scheduler)
    if cache is None or not cache.tree_core.options.hold_siblings or cache.tree_core.by_lru():
        return make(scheduler, *args, **kwargs)
    return cache.queue.plan(scheduler, lambda: make(scheduler, *args, **kwargs))


def report(cache: Any, queued_prefill_tokens: int) -> None:
    """The coalesced facts."""
    core, count = cache.tree_core, cache.tree_core.count
    cache.facts.send(
        "residency",
        {
            "tokens": core.index.residency(),
            "queued": queued_prefill_tokens,
            "pace": round(cache.queue.pace.tokens_s, 1),
            "at": core.index.owners.now_s,
        },
    )
    tokens = {tier.name.lower(): count.evicted_tokens[tier] for tier in Tier}
    cache.facts.send(
        "evicted",
        {
            "tokens": tokens,
            "partial": count.partial,
            "fallbacks": count.fallbacks,
            "failures": count.failures,
            "trusted": core.trusted,
            "recent": list(count.recent),
        },
    )
    count.recent.clear()
    cache.facts.send("pools", {"tokens": pools(cache)})
    if cache.oversight is not None:
        cache.facts.send("overseen", {"policy": core.options.policy, **cache.oversight.report()})
    if cache.prefetcher is not None:
        done = cache.prefetcher.count
        cache.facts.send("prefetched", {"tokens": {name: getattr(done, name) for name in done.__slots__}})


def around_prefill(process: Any, results: Any, batch: Any, result: Any) -> Any:
    """Around `process_batch_result_prefill`: the state of the last prompt token of every prompt that is complete."""
    rows = _wanted(results, batch, lambda req: req.inflight_middle_chunks <= 0 and not req.is_retracted)
    done = process(results, batch, result)
    _send(results, batch, result, rows, "prefill")
    return done


def after_decode(done: Any, results: Any, batch: Any, result: Any) -> None:
    """After `process_batch_result_decode`: the state of the last token of every request that has just finished."""
    rows = _wanted(results, batch, lambda req: req.finished() and not hasattr(req, "pbkv_decoded"))
    for row in rows:
        batch.reqs[row].pbkv_decoded = True  # overlapped scheduling shows a finished request once more
    _send(results, batch, result, rows, "decoded")


def _wanted(results: Any, batch: Any, which: Any) -> list[int]:
    facts = getattr(results.tree_cache, "facts", None)
    if facts is None or not results.tree_cache.tree_core.options.hidden_states:
        return []
    return [row for row, req in enumerate(batch.reqs) if which(req) and owner_of(req) is not None]


def _send(results: Any, batch: Any, result: Any, rows: list[int], token: Any) -> None:
    states = result.logits_output.hidden_states if rows and result.logits_output is not None else None
    if states is None or len(states) != len(batch.reqs):  # full capture or speculation: rows are not requests
        return
    vectors = states[torch.tensor(rows, device=states.device)].to(torch.float16).cpu().numpy()
    for row, vector in zip(rows, vectors, strict=True):
        req = batch.reqs[row]
        blocks = getattr(req, "pbkv_blocks", None) if token == "prefill" else None
        results.tree_cache.facts.hidden(req.rid, token, vector, blocks)


def register() -> None:
    setattr(Scheduler, RPC, apply_hints)
    setattr(Scheduler, RPC_CHOOSE, choose_policy)
    HookRegistry.register(f"{_SCHEDULER}.get_next_batch_to_run", after_plan, HookType.AFTER)
    HookRegistry.register(f"{_SCHEDULER}.get_new_batch_prefill", around_new_prefill, HookType.AROUND)
    HookRegistry.register(f"{_SCHEDULER}._add_request_to_queue", after_queue, HookType.AFTER)
    HookRegistry.register(f"{_SCHEDULER}.handle_rpc_request", around_rpc, HookType.AROUND)
    HookRegistry.register(f"{_RESULTS}.process_batch_result_prefill", around_prefill, HookType.AROUND)
    HookRegistry.register(f"{_RESULTS}.process_batch_result_decode", after_decode, HookType.AFTER)
    logging.getLogger(Scheduler.__module__).addFilter(QuietPayloads())
    if os.environ.get(measured.SWITCH):
        measured.register()

"""Why calls missed: feeds `core.misses` from the tree, and tells each call's answer as a fact.

For reports only: whatever fails here is logged once and ends the reports, not the cache.
"""

import logging
from collections.abc import Callable
from typing import Any

from pbkv_ray.core.misses import MissLedger
from pbkv_ray.core.nodes import Explanation, Tier
from pbkv_ray.engine.blocks import blocks_of
from pbkv_ray.engine.facts import FactsSender
from pbkv_ray.engine.hints import Owner

logger = logging.getLogger(__name__)

FINE_TOKENS = 16  # of core.ghost.LearnedReuse in an engine: its hashes are used again
COARSE = 4
MAX_SPANS = 16  # of a call; the last one then stands for the rest
MAX_OWNERS = 8  # runs of a node that remember its eviction


class EngineMisses:
    def __init__(self, facts: FactsSender, now_s: Callable[[], float]) -> None:
        """`now_s`: the broadcast clock."""
        self._facts = facts
        self._now_s = now_s
        self._ledger = MissLedger(COARSE * FINE_TOKENS)
        self._broken = False

    def clear(self) -> None:
        self._ledger.clear()

    def evicted(self, tier: Tier, tokens: int, why: Explanation) -> None:
        """A node leaves `tier` now."""
        runs = [run for run, _ in why.owners[:MAX_OWNERS]]
        if runs:
            self._try(lambda: self._ledger.left(runs, why.depth, tokens, tier, why.reason, why.key[1], self._now_s()))

    def admitted(self, req: Any, owner: Owner | None) -> None:
        """The request of `owner` joins a batch, its cached prefix is known."""
        if owner is not None:
            self._try(lambda: self._admitted(req, owner))

    def _admitted(self, req: Any, owner: Owner) -> None:
        prompt = req.origin_input_ids
        blocks = blocks_of(req, FINE_TOKENS)[COARSE - 1 :: COARSE]  # chained: every fourth names all four
        device, host = int(req.cached_tokens_device), int(req.cached_tokens_host)
        missed = self._ledger.call(owner.run, len(prompt), device, host, blocks, req.extra_key)
        spans = [[m.start, m.end, m.cause, m.at_s, m.score, m.reason] for m in missed[:MAX_SPANS]]
        if len(missed) > MAX_SPANS:
            spans[-1][1] = missed[-1].end
        self._facts.send("missed", {"call": req.rid, "spans": spans})

    def _try(self, what: Callable[[], None]) -> None:
        if self._broken:
            return
        try:
            what()
        except Exception:
            self._broken = True
            logger.exception("misses are not explained any more")

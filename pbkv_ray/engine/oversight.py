"""Who decides what leaves an engine's cache: its policy, or LRU, by order of an operator or of the guard.

Runs in the scheduler, on every rank alike: from the requests themselves and from broadcast orders, never from a
rank's own clock. What fails here is counted, and leaves the policy in charge.
"""

import logging
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pbkv_ray.core.ghost import block_hashes
from pbkv_ray.core.guard import Guard
from pbkv_ray.core.shadow import ShadowLru
from pbkv_ray.engine.blocks import blocks_of

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class OversightCount:
    failures: int = 0  # the shadow raised, and is off from then on


class Oversight:
    """One engine's. `pool_tokens`: its device tier. `guards`: the guard may act; else it only looks on."""

    def __init__(self, pool_tokens: int, block_tokens: int, *, shadow: bool, guards: bool) -> None:
        self.count = OversightCount()
        self.ordered = False  # an operator wants LRU
        self.guard = Guard(pool_tokens)
        self._block_tokens = block_tokens
        self._guards = guards
        self._shadow = ShadowLru(pool_tokens, block_tokens) if shadow and pool_tokens >= block_tokens else None

    @property
    def by_lru(self) -> bool:
        """SGLang's LRU is in charge."""
        return self.ordered or self.guard.mode == "fallback"

    @property
    def watches(self) -> bool:
        return self._shadow is not None

    def admitted(self, req: Any, device_hit: int) -> None:
        """Once a call, when its prompt has been matched."""
        if self._shadow is None:
            return
        try:
            made = blocks_of(req, self._block_tokens)
            path = self._shadow.followed(_salted(req, made))
            req.pbkv_shadow = made, path
            found = self._shadow.find(path)
            seen = len(req.origin_input_ids), device_hit, found
            if self.ordered:
                return
            if not self._guards:
                self.guard.counted(*seen)
            elif self.guard.served(*seen):
                self._say()
        except Exception:
            self._fail()

    def stored(self, req: Any, up_to: int) -> None:
        """The first `up_to` tokens of the request, prompt and output, are in the tree."""
        known = getattr(req, "pbkv_shadow", None)
        if self._shadow is None or known is None:
            return
        try:
            whole, (blocks, path) = up_to // self._block_tokens, known
            if whole > path.size:
                blocks = block_hashes(req.full_untruncated_fill_ids[:up_to], self._block_tokens, blocks)
                path = self._shadow.followed(_salted(req, blocks))
                req.pbkv_shadow = blocks, path
            elif whole < path.size:  # a chunk of the prompt
                path = self._shadow.followed(_salted(req, blocks[:whole]))
            self._shadow.put(path, len(req.origin_input_ids) // self._block_tokens)
        except Exception:
            self._fail()

    def cleared(self) -> None:
        """The cache was emptied."""
        if self._shadow is not None:
            self._shadow.clear()

    def order(self, lru: bool) -> None:
        """An operator puts LRU in charge, or the policy."""
        if lru != self.ordered:
            logger.warning("by order, %s is in charge of the cache", "LRU" if lru else "the policy")
        self.ordered = lru
        self.guard.reset()

    def report(self) -> dict[str, Any]:
        """What `facts.Overseen` says."""
        guard = self.guard
        return {
            "state": "ordered" if self.ordered else "fallback" if self.by_lru else "policy",
            "watches": self.watches,
            "prompt": guard.count.prompt,
            "hit": guard.count.hit,
            "lru": guard.count.lru,
            "fallbacks": guard.count.fallbacks,
            "returns": guard.count.returns,
            "debt": round(guard.debt),
            "rest": guard.rest_tokens,
            "error": round(guard.error, 4),
            "failures": self.count.failures,
        }

    def _say(self) -> None:
        count, guard = self.guard.count, self.guard
        hit, lru = count.hit / max(1, count.prompt), count.lru / max(1, count.prompt)
        if guard.mode == "fallback":
            logger.warning(
                "the policy lost against LRU: so far %.3f of the prompt tokens hit, LRU's shadow %.3f. LRU is in "
                "charge for the next %d prompt tokens (%d times so far)",
                hit, lru, guard.rest_tokens, count.fallbacks,
            )  # fmt: skip
        else:
            logger.warning("the policy is tried again: so far %.3f hit, LRU's shadow %.3f", hit, lru)

    def _fail(self) -> None:
        self.count.failures += 1
        self._shadow = None
        self.guard.reset()
        logger.exception("the shadow of LRU failed and is off; the guard with it")


def _salted(req: Any, blocks: Sequence[int]) -> Sequence[int]:
    """Prompts of tenants that share no cache share no blocks. Python's own hash of a text differs from rank to rank."""
    space = f"{getattr(req, 'extra_key', None) or ''}\0{getattr(req, 'cache_salt', None) or ''}"
    if space == "\0":
        return blocks
    salt = zlib.crc32(space.encode()) * 0x9E3779B1 & 0x7FFF_FFFF_FFFF_FFFF  # hashes are signed words
    return [block ^ salt for block in blocks]

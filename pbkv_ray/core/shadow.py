"""A shadow of plain LRU: what it would have hit in the same device tier, from sampled blocks, in bounded memory.

LRU on a radix tree that evicts leaves first is LRU over blocks in which every use touches its deepest block first:
then a parent is never older than its child, and what is held of a prompt is always a prefix of it.

Only one block of every `stride` is followed, and the cache is `stride` times smaller (the idea of SHARDS, Waldspurger
et al. 2015). Which one, the first block of each stretch of `stride` blocks decides by its hash: prompts that agree on
a stretch follow the same block of it, every block is followed with the same probability, and of a long context there
is one in every stretch. Sampling blocks independently would leave a pool of few contexts to luck. What is left to luck
is where a prompt that all runs share ends within its last stretch: keep strides well below the length of prompts.

SGLang's LRU frees whole nodes, not blocks. So does the shadow: a node ends where contexts branched, or where a prompt
or an output ended before it was extended (SGLang never merges nodes again).
"""

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from pbkv_ray.errors import ConfigError

ROOT = 0


class Path(NamedTuple):
    """What is followed of a prompt of `size` blocks: blocks, first to last, and their places in it."""

    blocks: Sequence[int]
    places: Sequence[int]
    size: int


class ShadowLru:
    """One device tier under LRU. Blocks are prefix-chained hashes (`core.ghost.block_hashes`), equal on every rank.

    `find` what a prompt would have found, `put` what a call leaves behind: the prompt once it is computed, then all.
    Raises ConfigError for a capacity of less than a block.
    """

    def __init__(
        self,
        capacity_tokens: int,
        block_tokens: int = 16,
        *,
        stride: int | None = None,
        max_followed: int = 8_192,
        whole_nodes: bool = True,
    ) -> None:
        """stride: blocks that each followed one stands for; None: the least power of two with which the tier's
        blocks are at most `max_followed` (about 130 bytes each). whole_nodes: as SGLang; else no more goes than must.
        """
        blocks = capacity_tokens // block_tokens
        if blocks < 1:
            raise ConfigError(f"a pool of {capacity_tokens} tokens holds no block of {block_tokens}; enlarge it")
        if stride is None:
            stride = 1
            while blocks > stride * max_followed:
                stride *= 2
        self.stride = stride
        self.block_tokens = block_tokens
        self.room = max(1, round(blocks / stride))  # followed blocks that the tier holds
        self._whole = whole_nodes
        self._held: OrderedDict[int, int] = OrderedDict()  # block -> its followed parent; least recent first
        self._ends: set[int] = set()  # blocks with which a node ends, though it may have children

    def __len__(self) -> int:
        """Followed blocks that are held: never more than `room` and one call."""
        return len(self._held)

    def find(self, blocks: "Sequence[int] | Path") -> int:
        """Tokens of the prompt that LRU would have had; what was found is recent now.

        A sum over calls is unbiased; one call's figure is a multiple of stride x block, and may be one too much.
        """
        held, path, found = self._held, self.followed(blocks).blocks, list[int]()
        for block in path:
            if block not in held:
                break
            found.append(block)
        for block in reversed(found):
            held.move_to_end(block)
        # Where a prompt leaves what is held, it mostly does so within a block, and the tree matches single tokens.
        within = (self.block_tokens - 1) // 2 if 0 < len(found) < len(path) else 0
        return len(found) * self.stride * self.block_tokens + within

    def put(self, blocks: "Sequence[int] | Path", prompt: int = 0) -> None:
        """A call's blocks are in the tier now, and recent. prompt: how many of them are the prompt's, if there is more:
        SGLang keeps an output in a node of its own."""
        held, ends = self._held, self._ends
        followed = self.followed(blocks)
        path = followed.blocks
        above, joined = ROOT, True  # joined: `above` is of this call's own node
        for block in path:
            if block in held:
                joined = False
            else:
                held[block] = above
                if not joined:
                    ends.add(above)
                joined = True
            above = block
        if not joined:
            ends.add(above)
        if 0 < prompt < followed.size and (whole := bisect_left(followed.places, prompt)):
            ends.add(path[whole - 1])
        for block in reversed(path):
            held.move_to_end(block)
        while len(held) > self.room:
            self._evict()

    def clear(self) -> None:
        """The cache was emptied."""
        self._held.clear()
        self._ends.clear()

    def followed(self, blocks: "Sequence[int] | Path") -> "Path":
        """Those of a prompt's blocks that are followed; a path is taken as it is."""
        if isinstance(blocks, Path):
            return blocks
        stride, size = self.stride, len(blocks)
        if stride == 1:
            return Path(blocks, range(size), size)
        # The hash of a prefix is mixed well in all its bits; modulo a power of two takes the lowest.
        hashes = np.array(blocks, np.int64)
        places = np.arange(0, size, stride)
        places += hashes[places] % stride
        if size and places[-1] >= size:
            places = places[:-1]
        return Path(hashes[places].tolist(), places.tolist(), size)

    def _evict(self) -> None:
        """The oldest block, a leaf; then the rest of its node."""
        held, ends = self._held, self._ends
        while True:
            block, above = held.popitem(last=False)
            ends.discard(block)
            if not self._whole or above == ROOT or above in ends or next(iter(held)) != above:
                return

    def check_invariants(self) -> None:
        """Raises AssertionError with what is wrong."""
        assert len(self._held) <= self.room
        assert self._ends <= self._held.keys()
        older: set[int] = set()
        for block, above in self._held.items():
            assert above == ROOT or above in self._held, f"{block} is held without its parent"
            assert above not in older, f"{above} is older than its child {block}"
            older.add(block)

"""The shadow of LRU against LRU itself: exact when every block is followed, and close when few are."""

import random
from array import array
from collections.abc import Iterator, Sequence
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pbkv_ray.core.ghost import block_hashes
from pbkv_ray.core.shadow import ShadowLru
from pbkv_ray.errors import ConfigError

Path = tuple[int, ...]


class BlockLru:
    """LRU that frees single blocks: the least recently used leaf, one after the other. Blocks are their paths."""

    def __init__(self, room: int) -> None:
        self.room, self.clock, self.used = room, 0, dict[Path, int]()

    def find(self, prompt: Path) -> int:
        found = 0
        while found < len(prompt) and prompt[: found + 1] in self.used:
            found += 1
        self._touch(prompt[:found])
        return found

    def put(self, prompt: Path, cut: int = 0) -> None:
        self._touch(prompt)
        while len(self.used) > self.room:
            leaves = set(self.used) - {path[:-1] for path in self.used}
            del self.used[min(leaves, key=lambda path: self.used[path])]

    def _touch(self, prompt: Path) -> None:
        self.clock += 1
        for end in range(1, len(prompt) + 1):
            self.used[prompt[:end]] = self.clock


class NodeLru(BlockLru):
    """LRU that frees whole nodes of a radix tree, as SGLang does. `cuts`: paths with which a node ends."""

    def __init__(self, room: int) -> None:
        super().__init__(room)
        self.cuts: set[Path] = set()

    def put(self, prompt: Path, cut: int = 0) -> None:
        known = 0
        while known < len(prompt) and prompt[: known + 1] in self.used:
            known += 1
        self.cuts |= {prompt[:known], prompt[:cut], prompt}
        self._touch(prompt)
        while len(self.used) > self.room:
            leaves = set(self.used) - {path[:-1] for path in self.used}
            leaf = min(leaves, key=lambda path: self.used[path])
            del self.used[leaf]
            while (leaf := leaf[:-1]) and leaf not in self.cuts:
                del self.used[leaf]
            self.cuts &= {(), *self.used}


def chained(prompt: Sequence[int]) -> Sequence[int]:
    return block_hashes(prompt, 1)


tokens = st.lists(st.integers(0, 9), max_size=40)
prompts = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=8).map(tuple), max_size=24)


@settings(max_examples=30, deadline=None)
@given(calls=prompts, room=st.integers(8, 16), whole=st.booleans())
def test_with_every_block_followed_it_is_lru(calls: list[Path], room: int, whole: bool) -> None:
    shadow = ShadowLru(room, 1, stride=1, whole_nodes=whole)
    real = NodeLru(room) if whole else BlockLru(room)
    for prompt in calls:
        assert shadow.find(chained(prompt)) == real.find(prompt)
        cut = len(prompt) // 2  # what comes behind is the output
        shadow.put(chained(prompt), cut)
        real.put(prompt, cut)
        assert len(shadow) == len(real.used)
        shadow.check_invariants()


@settings(max_examples=25, deadline=None)
@given(calls=prompts, stride=st.sampled_from((2, 4, 8)), room=st.integers(1, 6))
def test_with_few_followed_what_is_held_is_bounded_and_begins_at_the_root(
    calls: list[Path], stride: int, room: int
) -> None:
    shadow = ShadowLru(room * stride, 1, stride=stride)
    for prompt in calls:
        shadow.find(chained(prompt))
        shadow.put(chained(prompt))
        shadow.check_invariants()
    assert shadow.room == room


@settings(max_examples=25, deadline=None)
@given(
    one=st.lists(st.integers(0, 9), max_size=40), other=st.lists(st.integers(0, 9), max_size=40), cut=st.integers(0, 40)
)
def test_prompts_that_agree_follow_the_same_blocks(one: list[int], other: list[int], cut: int) -> None:
    shadow = ShadowLru(1_000, 1, stride=4)
    a, b = chained(one), chained([*one[:cut], *other])
    common = set(a) & set(b)
    assert set(shadow.followed(a).blocks) & common == set(shadow.followed(b).blocks) & common


def runs(calls: int, seed: int) -> Iterator[list[int]]:
    """Prompts of 24 runs at a time: a system prompt by agent, a context of the run's own that grows and starts anew."""
    dice = random.Random(seed)
    systems = [[-agent] * dice.randrange(10, 120) for agent in range(1, 5)]
    contexts: dict[tuple[int, int], list[int]] = {}
    ends: dict[int, int] = {}
    for fresh in range(calls):
        slot, agent = dice.randrange(24), dice.randrange(4)
        if ends.get(slot, 0) <= 0:  # the run of this slot has ended
            ends[slot] = dice.randrange(5, 40)
            contexts = {who: context for who, context in contexts.items() if who[0] != slot}
        ends[slot] -= 1
        context = contexts.setdefault((slot, agent), [*systems[agent], 1_000_000 + fresh])
        context += [fresh] * dice.randrange(1, 60)
        yield list(context)


@cache
def figures(stride: int, room: int = 3_000) -> tuple[float, int]:
    """(hit rate, followed blocks held) of a shadow on 600 calls."""
    shadow, asked, hits = ShadowLru(room, 1, stride=stride), 0, 0
    for prompt in runs(600, seed=7):
        blocks = chained(prompt)
        asked += len(blocks)
        hits += shadow.find(blocks)
        shadow.put(blocks)
    return hits / asked, len(shadow)


@pytest.mark.parametrize("stride", [4, 8, 16])
def test_a_sampled_shadow_is_within_two_points_of_the_exact_one(stride: int) -> None:
    exact, _ = figures(1)
    sampled, held = figures(stride)
    assert 0.15 < exact < 0.9
    assert sampled == pytest.approx(exact, abs=0.02)
    assert held <= 3_000 // stride


def test_the_stride_follows_from_the_pool_and_the_memory() -> None:
    strides = [ShadowLru(tokens, 16, max_followed=1_024).stride for tokens in (16, 16_384, 16_400, 1 << 20)]
    assert strides == [1, 1, 2, 64]
    assert ShadowLru(1 << 20, 16).stride == 8


def test_the_chain_of_a_prompt_goes_on_with_its_output() -> None:
    tokens = list(range(100))
    assert block_hashes(tokens, 16, block_hashes(tokens[:50], 16)) == block_hashes(tokens, 16)
    assert block_hashes(array("q", tokens), 16) == block_hashes(tokens, 16)
    assert [hash_ % (1 << 64) for hash_ in block_hashes(tokens[:40], 16)] == chain(tokens, 2)


def chain(tokens: list[int], blocks: int) -> list[int]:
    """The same one token at a time, in Python's integers: every rank and machine must agree."""
    word, total, out = (1 << 64) - 1, 0, []
    for place, token in enumerate(tokens[: 16 * blocks], 1):
        x = (token + place * 0x9E3779B97F4A7C15) & word
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & word
        x = (x ^ x >> 27) * 0x94D049BB133111EB & word
        total = (total + (x ^ x >> 31)) & word
        out.append(total)
    return out[15::16]


def test_a_prompt_of_any_length_is_hashed_as_one() -> None:
    tokens = list(range(70_000))
    whole = block_hashes(tokens, 16)
    assert whole == block_hashes(tokens, 16, block_hashes(tokens[:40_000], 16))
    assert [hash_ % (1 << 64) for hash_ in whole] == chain(tokens, 70_000 // 16)
    assert len(set(whole)) == len(whole)
    assert {hash_ % 8 for hash_ in whole} == set(range(8))  # what the shadow samples by


def test_a_pool_without_a_single_block_is_refused() -> None:
    with pytest.raises(ConfigError, match="holds no block"):
        ShadowLru(15, 16)

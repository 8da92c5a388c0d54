"""Our faster walks against SGLang's own Python tree core: the same calls leave the same tree behind, slot for slot."""

from typing import Any

import pytest

pytest.importorskip("sglang")
from pbkv_ray.replay.bare_cache import BareCache
from tests.shells.test_radix import TIERS, calls


def tree(bare: BareCache) -> list[tuple[Any, ...]]:
    """Every node, longest unused first: its tokens from the root, slots in both tiers, and what SGLang counts."""
    core: Any = bare.cache.tree_core
    nodes, below = [], [(core.root_node, ())]
    while below:
        node, before = below.pop()
        for child in node.children.values():
            path = (*before, *child.key.token_ids)
            full = child.component_data[0]
            slots = [None if value is None else value.tolist() for value in (full.value, full.host_value)]
            leaf = child in core.evictable_device_leaves, child in core.evictable_host_leaves
            counts = child.hit_count, child.priority, full.lock_ref, full.host_lock_ref
            nodes.append((child.last_access_time, path, slots, leaf, counts))
            below.append((child, path))
    return [node[1:] for node in sorted(nodes, key=lambda node: node[0])]


@pytest.mark.parametrize("tiers", TIERS)
@pytest.mark.parametrize("tokens", [600, 50_000])
def test_the_same_calls_leave_the_same_tree(tiers: str, tokens: int) -> None:
    stock = BareCache("lru", tokens, core="python", **TIERS[tiers])
    ours = BareCache("lae", tokens, **TIERS[tiers])
    for number, (caller, prompt, output) in enumerate(calls(7, 150)):
        assert ours.call(caller, prompt, output) == stock.call(caller, prompt, output), number
        if number % 10 == 0:
            assert tree(ours) == tree(stock), number
    assert tree(ours) == tree(stock)
    assert ours.cache.evictable_size() == stock.cache.evictable_size()
    assert (ours.cache.tree_core.trusted, ours.cache.tree_core.count.failures) == (True, 0)
    ours.index.check_invariants()


def test_calls_that_overlap_leave_the_same_tree() -> None:
    """Requests in flight hold their paths locked; siblings compute the same tokens, and one gives its slots back."""
    trees = []
    for bare in (BareCache("lru", 4_000, core="python", host_ratio=2.0), BareCache("lae", 4_000, host_ratio=2.0)):
        waiting: list[Any] = []
        seen = []
        for number, (caller, prompt, output) in enumerate(calls(3, 120)):
            waiting.append((bare.begin(caller, prompt), output))
            if number % 3 == 0:
                waiting.append((bare.begin(caller, prompt), output))  # both decode the same
            seen.append((tree(bare), bare.allocator.available_size()))
            while len(waiting) > 4:
                bare.finish(*waiting.pop(number % 3))
        for left in waiting:
            bare.finish(*left)
        trees.append([*seen, (tree(bare), bare.allocator.available_size())])
    assert trees[0] == trees[1]

"""The bound is a bound: never below any policy, equal to the best of all schedules on small instances."""

from functools import lru_cache
from itertools import combinations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from pbkv_ray.replay.belady import belady_hits

# A small tree: block -> its parent. Prompts are root paths.
PARENTS = {0: -1, 1: 0, 2: 1, 3: 0, 4: 3, 5: -1, 6: 5}


def path(block: int) -> list[int]:
    return [] if block < 0 else [*path(PARENTS[block]), block]


def best(prompts: list[list[int]], capacity: int) -> int:
    """By trying every set of blocks that could be kept after each call, closed under parents."""

    @lru_cache(None)
    def after(t: int, held: frozenset[int]) -> int:
        if t == len(prompts):
            return 0
        asked = prompts[t]
        hit = next((i for i, block in enumerate(asked) if block not in held), len(asked))
        others = sorted(held - set(asked))
        room = capacity - len(asked)
        keep = [
            set(chosen)
            for n in range(min(room, len(others)) + 1)
            for chosen in combinations(others, n)
            if all(PARENTS[b] < 0 or PARENTS[b] in set(chosen) | set(asked) for b in chosen)
        ]
        return hit + max(after(t + 1, frozenset(kept | set(asked))) for kept in keep)

    return after(0, frozenset())


@given(st.lists(st.sampled_from(sorted(PARENTS)), min_size=1, max_size=8), st.integers(3, 6))
@settings(max_examples=150, deadline=None)
def test_no_schedule_hits_more(asked: list[int], capacity: int) -> None:
    prompts = [path(block) for block in asked]
    arrays = [np.array(prompt, np.int64) for prompt in prompts]
    assert int(belady_hits(arrays, arrays, capacity).sum()) == best(prompts, capacity)


def test_a_prompt_above_the_pool_is_refused_and_changes_nothing() -> None:
    small, large = np.array([1, 2]), np.arange(10, 20)
    assert belady_hits([small, large, small], [small, large, small], 4).tolist() == [0, 0, 2]


def test_outputs_take_room_but_are_not_asked_for() -> None:
    a, b = np.array([1, 2]), np.array([3, 4])
    held = [np.array([1, 2, 90]), np.array([3, 4, 91]), a]
    assert belady_hits([a, b, a], held, 5).tolist() == [0, 0, 2]

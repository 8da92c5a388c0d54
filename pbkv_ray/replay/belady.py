"""Belady's optimum on a prefix tree: clairvoyant, leaf first, the calls in flight pinned (here one at a time).

Works on single units, not on tree nodes, so it bounds every policy that frees whole nodes or their tails. A parent
is used whenever a child is, hence never later: "farthest next use, deepest first" never frees a parent before its
child.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int64]
_NEVER = np.int64(1) << 40
_DEPTH = np.int64(1) << 20


def belady_hits(prompts: Sequence[Ids], held: Sequence[Ids], capacity: int) -> npt.NDArray[np.int64]:
    """[calls] units of each prompt found in a cache of `capacity` units.

    prompts: units asked for, per call in order. held: units that the call leaves behind (its prompt, then its
    output); pinned while it is served. A call whose units exceed the capacity is refused: no hit, no effect.
    """
    names, flat = np.unique(np.concatenate([np.empty(0, np.int64), *held]), return_inverse=True)
    ends = np.cumsum([len(units) for units in held])
    compact = [flat[end - len(units) : end] for units, end in zip(held, ends, strict=True)]
    asked = [len(prompt) for prompt in prompts]
    next_use = _next_uses(compact, asked, len(names), capacity)

    key = np.full(len(names), -1, np.int64)  # larger goes first; -1: not cached
    used, hits = 0, np.zeros(len(held), np.int64)
    for t, units in enumerate(compact):
        if len(units) > capacity:
            continue
        cached = key[units] >= 0
        prompt = cached[: asked[t]]
        hits[t] = len(prompt) if prompt.all() else int(prompt.argmin())
        over = used + len(units) - int(cached.sum()) - capacity
        key[units] = -1
        if over > 0:
            candidates = np.flatnonzero(key >= 0)
            chosen = candidates[np.argpartition(key[candidates], len(candidates) - over)[len(candidates) - over :]]
            key[chosen] = -1
            used -= over
        used += len(units) - int(cached.sum())
        key[units] = next_use[t] * _DEPTH + np.arange(len(units))
    return hits


def _next_uses(
    held: Sequence[npt.NDArray[np.intp]], asked: Sequence[int], names: int, capacity: int
) -> list[npt.NDArray[np.int64]]:
    """Per call and unit, the number of the next call that asks for the unit."""
    upcoming = np.full(names, _NEVER, np.int64)
    result: list[npt.NDArray[np.int64]] = [np.empty(0, np.int64)] * len(held)
    for t in range(len(held) - 1, -1, -1):
        if len(held[t]) <= capacity:
            result[t] = upcoming[held[t]]
            upcoming[held[t][: asked[t]]] = t
    return result

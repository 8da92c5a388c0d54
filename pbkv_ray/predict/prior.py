"""What a LangGraph graph alone says about the next agents: the forecast before anything was counted."""

from collections.abc import Iterable, Sequence

import numpy as np

from pbkv_ray.core.forecast import Array


def first_agents(names: Sequence[str], agents: Sequence[str], edges: Iterable[tuple[str, str]]) -> Array:
    """[1 + len(names), 1 + len(names)]: which agent (column 1 + i) or END (column 0) a walk along the graph
    meets first, from `__start__` (row 0) or from agent i (row 1 + i), every edge being as likely as its siblings.

    A walk that cannot go on (an agent whose successors the graph does not say, or that is not of the graph) is
    uniform over `agents` and END.
    """
    ends = {"__end__": 0, **{name: 1 + i for i, name in enumerate(names) if name in set(agents)}}
    following: dict[str, list[str]] = {}
    for source, target in edges:
        following.setdefault(source, []).append(target)
    anywhere = np.zeros(1 + len(names))
    anywhere[list(ends.values())] = 1.0 / len(ends)
    passing = [name for name in following if name not in ends or name == "__start__"]
    # Nodes that are no agents only pass the walk on: a linear system, solved by repeated substitution.
    reach = {name: anywhere for name in passing}

    def hop(name: str) -> Array:
        targets = following.get(name)
        if not targets:
            return anywhere
        share = np.zeros(1 + len(names))
        for target in targets:
            if target in ends:
                share[ends[target]] += 1.0
            else:
                share += reach.get(target, anywhere)
        return share / len(targets)

    for _ in range(min(64, 2 * len(passing) + 1)):
        reach = {name: hop(name) for name in passing}
    return np.stack([hop("__start__"), *(hop(name) for name in names)])


def propagate(hops: Array, horizon: int) -> Array:
    """[rows, horizon, columns] from one-step `hops` [rows, columns], column 0 END: step k given that the run has
    not ended before it (paper 1.2: END as a hazard)."""
    steps = [hops]
    for _ in range(horizon - 1):
        alive = steps[-1][:, 1:]
        mass = alive.sum(1, keepdims=True)
        alive = np.divide(alive, mass, out=np.full_like(alive, 1.0 / max(1, alive.shape[1])), where=mass > 0)
        steps.append(alive @ hops[1:])
    return np.stack(steps, axis=1)

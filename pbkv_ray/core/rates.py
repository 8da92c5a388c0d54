"""What is known of reuse: P(a node is really used | an agent is called), for scores. `core.ghost` learns it."""

from bisect import bisect_left
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]

DEPTHS = (0, 1_024, 4_096, 16_384)  # tokens before a node's first one, lower edges of the depth classes
STAY, BACK, OLDER, STALE, SHARED = range(5)
KINDS = 5


def depth_class(tokens: int) -> int:
    """Class of a node with `tokens` tokens before it; grows with depth, so a child's is never below its parent's."""
    return bisect_left(DEPTHS, tokens + 1) - 1


@dataclass(frozen=True, slots=True, eq=False)
class Rates:
    """Learned reuse in the columns of one run's agents (B); C depth classes, falling along C.

    kind: [KINDS, C, B] by STAY, BACK, OLDER, STALE, SHARED; stale is the least, shared the greatest of all.
    cross: [2, B, B] from the agent whose latest prompt holds the node (row) to the one that is called; [1] for shared
        nodes, whoever has read them.
    next: [2, C, B] latest prompt, older prompt: in the run's very next call, given who called last.
    handed: [B, B] cross[0] in the run's very next call, given who called last.
    """

    kind: Array
    cross: Array
    next: Array
    handed: Array

    def use(
        self,
        ever: npt.NDArray[np.bool_],
        fresh: npt.NDArray[np.bool_],
        older: npt.NDArray[np.bool_],
        shared: npt.NDArray[np.bool_],
        depth: npt.NDArray[np.int64],
    ) -> tuple[Array, Array, Array]:
        """Three [R, B]: P(used | that agent calls) after other calls, without any in between, as the next call."""
        public = shared[:, None]
        floor = np.maximum(ever * self.kind[STALE][depth], fresh * public * self.kind[SHARED][depth])
        floor = np.maximum(floor, public * _widest(ever, self.cross[1]))
        later = np.maximum(floor, _widest(fresh, self.cross[0]))
        later = np.maximum(later, older * self.kind[OLDER][depth])
        soon = np.maximum(floor, _widest(fresh, self.handed))
        soon = np.maximum(soon, older * self.next[1][depth])
        return (
            np.maximum(later, fresh * self.kind[BACK][depth]),
            np.maximum(later, fresh * self.kind[STAY][depth]),
            np.maximum(soon, fresh * self.next[0][depth]),
        )


def _widest(readers: npt.NDArray[np.bool_], cross: Array) -> Array:
    """[R, B]: of the agents that are `readers` [R, B], the greatest rate [B, B] towards each agent."""
    return np.asarray((readers[:, :, None] * cross).max(axis=1))


def certain(agents: int) -> Rates:
    """What an agent has read it uses again, and nothing else: the paper's assumption."""
    kind = np.ones((KINDS, len(DEPTHS), agents))
    none = np.zeros((2, agents, agents))
    return Rates(kind, none, kind[:2], none[0])

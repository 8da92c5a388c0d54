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
    next: [2, C, B] latest prompt, older prompt: in the run's very next call, given who called last.
    cross: [2, B, B] from the agent that read the node (row) to the one that is called; [1] for shared nodes.
    """

    kind: Array
    next: Array
    cross: Array

    def use(
        self,
        ever: npt.NDArray[np.bool_],
        fresh: npt.NDArray[np.bool_],
        older: npt.NDArray[np.bool_],
        shared: npt.NDArray[np.bool_],
        depth: npt.NDArray[np.int64],
    ) -> tuple[Array, Array, Array]:
        """Three [R, B]: P(used | that agent calls) after other calls, without any in between, as the next call."""
        handed = np.where(
            shared[:, None],
            (ever[:, :, None] * self.cross[1]).max(axis=1),
            (ever[:, :, None] * self.cross[0]).max(axis=1),
        )
        floor = np.maximum(handed, ever * self.kind[STALE][depth])
        floor = np.maximum(floor, (fresh & shared[:, None]) * self.kind[SHARED][depth])
        later = np.maximum(floor, older * self.kind[OLDER][depth])
        soon = np.maximum(floor, older * self.next[1][depth])
        return (
            np.maximum(later, fresh * self.kind[BACK][depth]),
            np.maximum(later, fresh * self.kind[STAY][depth]),
            np.maximum(soon, fresh * self.next[0][depth]),
        )


def certain(agents: int) -> Rates:
    """What an agent has read it uses again, and nothing else: the paper's assumption."""
    kind = np.ones((KINDS, len(DEPTHS), agents))
    return Rates(kind, kind[:2], np.zeros((2, agents, agents)))

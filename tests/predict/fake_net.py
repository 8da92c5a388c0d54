"""A net that says what a test wants to hear."""

from collections.abc import Sequence

import numpy as np

from pbkv_ray.predict.features import Paths
from pbkv_ray.predict.inference import ServedNet

AGENTS = ("a", "x", "y")


class FakeNet(ServedNet):
    """Answers `tell(paths)` [paths, agents + 1] for the first step, and END after it."""

    __slots__ = ("hidden", "tell")

    def placed(self, added: Sequence[str], transitions: object) -> np.ndarray:
        return np.zeros((len(self.agents) + 1 + len(added), 1))

    def forecast(self, placed: np.ndarray, paths: Paths, hidden: object = ()) -> np.ndarray:
        added = len(placed) - len(self.agents) - 1
        said = np.zeros((len(paths), self.horizon, len(self.agents) + 1))
        said[:, 0] = self.tell(paths)
        said[:, 1:, -1] = 1.0
        return np.concatenate((said[..., :-1], np.zeros((*said.shape[:2], added)), said[..., -1:]), -1)


def net(tell: object, agents: tuple[str, ...] = AGENTS, kind: type | None = None) -> "FakeNet":
    made = (kind or FakeNet)(agents, 10, (), np.ones(10), np.full(10, 0.9), np.zeros((1, 1)), {})
    object.__setattr__(made, "tell", tell)
    return made

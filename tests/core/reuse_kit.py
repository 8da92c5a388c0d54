"""A tree of one-token leaves around a real ReuseIndex, and forecasts that are sure."""

import numpy as np

from pbkv_ray.core.forecast import Forecast
from pbkv_ray.core.owners import OwnersOptions
from pbkv_ray.core.reuse import ReuseIndex, Tier
from pbkv_ray.core.scores import PaperScore, Score

DEVICE, HOST = Tier.DEVICE, Tier.HOST


def surely(agent: str, then: str | None = None) -> Forecast:
    """The next call is by `agent`, the one after it by `then`; None ends the run."""
    names = tuple(dict.fromkeys(name for name in (agent, then) if name))
    step = np.zeros((2, len(names) + 1))
    step[0, names.index(agent)] = 1.0
    step[1, names.index(then) if then else -1] = 1.0
    return Forecast(names, step)


class Tree:
    """Leaves that hang under a root, one token each, by name; used as they are made."""

    def __init__(self, score: Score | None = None, options: OwnersOptions | None = None) -> None:
        self.index = ReuseIndex[str](score or PaperScore(), options)
        self.version = 0

    def leaf(self, name: str, *users: tuple[str, str] | None, parent: str | None = None) -> None:
        """Users are (run, agent), None is foreign traffic."""
        self.index.add(name, 1, parent)
        if parent is not None:
            self.index.set_tier(parent, DEVICE, resident=True, evictable=False)
        self.index.set_tier(name, DEVICE, resident=True, evictable=True)
        for user in users:
            self.index.use(name, *(user or (None,)))

    def expect(self, run: str, forecast: Forecast, at_s: float = 0.0) -> None:
        self.version += 1
        self.index.update(run, forecast, version=self.version, at_s=at_s)

    def order(self, tier: Tier = DEVICE) -> list[str]:
        """All evictable leaves, first victim first; nothing is evicted."""
        walk = self.index.victims(tier)
        names = list(walk)
        walk.close()
        self.index.check_invariants()
        return names

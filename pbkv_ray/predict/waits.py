"""How long until the next call: log-normal waits per (agent, following), learned online.

Tool times are heavy-tailed and people answer tomorrow, so that a run which is overdue must be expected *later* the
longer it is silent: `LogNormal.remaining` says how much, in closed form.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pbkv_ray.core.forecast import Array
from pbkv_ray.predict.compiled import compiled

_SHORTEST_S = 1e-3
_MEMORY = 512.0  # observations after which older ones fade
_MAX_PAIRS = 4_096
_RENEW = 32  # observations after which means are computed anew


@dataclass(frozen=True, slots=True)
class LogNormal:
    """A wait in seconds: ln(wait) has mean `mu` and deviation `sigma`; `count` observations are behind it."""

    mu: float
    sigma: float
    count: float

    def mean(self) -> float:
        return math.exp(self.mu + self.sigma**2 / 2)

    def survival(self, seconds: float) -> float:
        """P(wait > seconds)."""
        if seconds <= 0:
            return 1.0
        return 0.5 * math.erfc((math.log(seconds) - self.mu) / (self.sigma * math.sqrt(2)))

    def remaining(self, elapsed: float) -> float:
        """E[wait - elapsed | wait > elapsed], in seconds."""
        if elapsed <= 0:
            return self.mean()
        tail = self.survival(elapsed)
        if tail < 1e-12:  # far beyond anything seen: as long again as it has been silent
            return elapsed
        shifted = LogNormal(self.mu + self.sigma**2, self.sigma, self.count)
        return max(0.0, self.mean() * shifted.survival(elapsed) / tail - elapsed)


class Waits:
    """Waits of one workflow, from the start of one call to the start of the next. A pair seen seldom leans on its
    agent, an agent seen seldom on the workflow. Bounded: beyond the bound new pairs only count for their agent."""

    def __init__(self) -> None:
        self._moments: dict[tuple[str | None, str | None], list[float]] = {}  # key -> [n, mean, M2] of ln(seconds)
        self._observed = 0
        self._means: dict[str | None, tuple[tuple[int, int], Array]] = {}  # agent -> (as of, [2, agents] seconds)

    def observe(self, agent: str, following: str, seconds: float) -> None:
        self._observed += 1
        value = math.log(max(seconds, _SHORTEST_S))
        for key in ((None, None), (agent, None), (agent, following)):
            moments = self._moments.get(key)
            if moments is None:
                if len(self._moments) >= _MAX_PAIRS:
                    continue
                moments = self._moments[key] = [0.0, 0.0, 0.0]
            if moments[0] >= _MEMORY:
                moments[0] /= 2
                moments[2] /= 2
            moments[0] += 1.0
            delta = value - moments[1]
            moments[1] += delta / moments[0]
            moments[2] += delta * (value - moments[1])

    def of(self, agent: str | None, following: str | None = None) -> LogNormal | None:
        """From a call of `agent` to the start of `following` (None: whichever comes); None if none was seen."""
        chain = [self._moments.get(key) for key in ((None, None), (agent, None), (agent, following))]
        if chain[0] is None:
            return None
        mean, spread, count = chain[0][1], max(chain[0][2] / chain[0][0], 0.01), chain[0][0]
        for moments in chain[1:]:
            if moments is not None:
                n = moments[0]
                old = mean
                mean = (n * moments[1] + 2 * old) / (n + 2)
                spread = (moments[2] + n * (moments[1] - mean) ** 2 + 2 * (spread + (old - mean) ** 2)) / (n + 2)
                count = n
        return LogNormal(mean, math.sqrt(spread), count)

    def expected(self, current: Sequence[str | None], agents: Sequence[str], steps: Array) -> Array | None:
        """[runs, K] expected seconds from the start of the call of the run's current agent to the start of call k + 1,
        given that it lives so long; `steps` are the forecasts' [runs, K, len(agents) + 1]. None: no wait was seen."""
        if (None, None) not in self._moments:
            return None
        places = {agent: i for i, agent in enumerate(dict.fromkeys(current))}
        means = np.array([self._per_step(agent, agents) for agent in places])  # [distinct, 2, agents]
        waits = np.empty(steps.shape[:2])
        _add_up(steps, np.array([places[agent] for agent in current]), means, waits)
        return waits

    def _per_step(self, agent: str | None, agents: Sequence[str]) -> Array:
        """[2, agents] mean seconds: the first wait by pair, later ones by the agent that is then left. Renewed now
        and then: one observation among hundreds moves little, and every forecast asks."""
        renewals = self._observed if self._observed < _RENEW else self._observed // _RENEW
        as_of = renewals, len(agents)
        known = self._means.get(agent)
        if known is None or known[0] != as_of:
            waits = [self.of(agent, name) for name in agents], [self.of(name) for name in agents]
            means = np.array([[w.mean() if w else 0.0 for w in row] for row in waits])
            if len(self._means) >= _MAX_PAIRS:
                self._means.clear()
            known = self._means[agent] = as_of, means
        return known[1]


@compiled
def _add_up(steps: Array, which: npt.NDArray[np.int64], means: Array, waits: Array) -> None:
    """Fill `waits` [runs, K] for `Waits.expected`; `means` [.., first or later, agents], `which` of them [runs]."""
    for run in range(waits.shape[0]):
        until = 0.0
        for k in range(waits.shape[1]):
            # The first wait is of the pair, a later one of the agent that was called before it.
            expected, mass = 0.0, 0.0
            before = max(0, k - 1)
            for agent in range(means.shape[2]):
                likely = steps[run, before, agent]
                mass += likely
                expected += likely * means[which[run], min(k, 1), agent]
            until += expected / max(mass, 1e-12)
            waits[run, k] = until

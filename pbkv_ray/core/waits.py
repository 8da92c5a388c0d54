"""How long until a silent run calls again: learned waiting times, and what is left of one after some silence.

Waits are counted per workflow and agent in bins of equal ratio, leaning on the workflow, then on everything seen, then
on a broad log-normal: so any shape is learned, and silence beyond anything seen means "about as long again" (heavy
tail), never "any moment now". A wait from the start of a call to the start of the run's next one has two parts, told
apart once the engine has answered: a long answer says nothing of the tool that follows it.
"""

import math
from collections import OrderedDict
from typing import Literal

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]

_PER_E = 6  # bins per factor e
_FIRST_S = 0.01
_BINS = 17 * _PER_E  # up to about 2.4e5 s, close to three days
Part = Literal["whole", "answer", "idle"]  # start to next start; start to end of the call; end to next start
ELAPSED_S: Array = np.concatenate(([0.0], _FIRST_S * np.exp(np.arange(1, _BINS) / _PER_E)))  # lower edges
_CENTRE_S: Array = _FIRST_S * np.exp((np.arange(_BINS) + 0.5) / _PER_E)
_REST_S: Array = np.maximum(0.0, _CENTRE_S[None] - ELAPSED_S[:, None])  # [elapsed, wait]
_AHEAD: Array = np.triu(np.ones((_BINS, _BINS)))
_NEAREST = 0.1
_KERNEL = np.exp(-0.5 * (np.arange(-3, 4) / 1.5) ** 2)  # an observation is smeared over a quarter of e
_KERNEL /= _KERNEL.sum()


def _lognormal(mean_s: float, sigma: float) -> Array:
    z = (np.log(_CENTRE_S) - math.log(mean_s)) / sigma
    p = np.exp(-0.5 * z * z)
    return np.asarray(p / p.sum())


_PRIOR = _lognormal(5.0, 2.0)


def at_elapsed(curve: Array, elapsed_s: Array) -> Array:
    """[n] the value of each row of `curve` [n, C] at its elapsed time, between the grid points of ELAPSED_S."""
    position = np.zeros(len(elapsed_s))
    late = elapsed_s > ELAPSED_S[1]
    position[late] = np.log(elapsed_s[late] / _FIRST_S) * _PER_E
    position[~late] = elapsed_s[~late] / ELAPSED_S[1]
    position = np.minimum(position, _BINS - 1.001)
    lower = position.astype(np.intp)
    part = position - lower
    rows = np.arange(len(curve))
    return np.asarray(curve[rows, lower] * (1 - part) + curve[rows, lower + 1] * part)


class WaitingTimes:
    """Bounded: `max_keys` parts of agents' waits over all workflows; the least recently seen one is forgotten. Not
    thread-safe."""

    def __init__(self, max_keys: int = 12_288, memory: float = 200.0) -> None:
        self._max_keys = max_keys
        self._memory = memory  # observations after which older ones fade
        self._counts: OrderedDict[tuple[str, ...], Array] = OrderedDict()
        self._curves: dict[tuple[str, ...], tuple[int, Array, float]] = {}
        self._seen = 0
        self.answers = False  # whether any call's end was ever told
        self.forgotten = 0

    def observe(self, workflow: str, agent: str, seconds: float, answer_s: float | None = None) -> None:
        """The run called again `seconds` after a call of `agent` had begun, which took `answer_s` of them, if that is
        known. Negative waits count as zero."""
        self._count("whole", workflow, agent, seconds)
        if answer_s is not None:
            self.answers = True
            self._count("answer", workflow, agent, answer_s)
            self._count("idle", workflow, agent, seconds - answer_s)
        self._seen += 1

    def _count(self, part: Part, workflow: str, agent: str, seconds: float) -> None:
        position = math.log(max(seconds, _FIRST_S) / _FIRST_S) * _PER_E
        centre = min(_BINS - 1, int(position))
        low, high = max(0, centre - 3), min(_BINS, centre + 4)
        smear = _KERNEL[low - centre + 3 : high - centre + 3]
        for key in ((part,), (part, workflow), (part, workflow, agent)):
            counts = self._counts.get(key)
            if counts is None:
                counts = self._counts[key] = np.zeros(_BINS)
                self._bound()
            elif counts.sum() > self._memory:
                counts *= 0.5
            self._counts.move_to_end(key)
            counts[low:high] += smear

    def _bound(self) -> None:
        while len(self._counts) > self._max_keys:
            key, _ = self._counts.popitem(last=False)
            self._curves.pop(key, None)
            self.forgotten += 1

    def _density(self, part: Part, workflow: str, agent: str) -> Array:
        density = _PRIOR
        for key, trust in (((part,), 2.0), ((part, workflow), 2.0), ((part, workflow, agent), 3.0)):
            counts = self._counts.get(key)
            if counts is not None:
                density = (counts + trust * density) / (counts.sum() + trust)
        return density

    def curve(self, workflow: str, agent: str, part: Part = "whole") -> tuple[Array, float]:
        """([C] expected 1 / remaining seconds at ELAPSED_S, given how long it lasts so far, the mean in seconds) of a
        part of the agent's wait."""
        key = (part, workflow, agent)
        known = self._curves.get(key)
        # The curve of an agent moves little once it is known: look again after 3 % more observations.
        if known is not None and self._seen <= known[0] + known[0] // 32:
            return known[1], known[2]
        density = self._density(part, workflow, agent)
        mean_s = float(density @ _CENTRE_S)
        tail = np.cumsum(density[::-1])[::-1]
        # E[1 / rest], not 1 / E[rest]: one wait in twenty that lasts an hour must not hide nineteen that end at once.
        # The rest is never less than a share of the mean, or the last bin would be worth everything.
        curve = (_AHEAD / (_REST_S + _NEAREST * mean_s)) @ density / np.maximum(tail, 1e-300)
        if len(self._curves) >= self._max_keys:
            self._curves.clear()
        self._curves[key] = (self._seen, curve, mean_s)
        return curve, mean_s

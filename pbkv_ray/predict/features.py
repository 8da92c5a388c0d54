"""What a path says beyond its agents: one vector a call, made step by step so that training and serving cannot differ.

The paper's model sees the current agent and a sum over the earlier ones without order; boosted trees on the features
below were 10 to 30 points better than order-1 counts on the public traces (agents that loop stop after so many turns).
"""

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]

_RECENT = 6  # last agents, one by one
_VISITS = 4  # last visits, with their lengths
_ONE_HOT = 12  # small numbers get a slot each
LENGTHS = 4  # the last slots: of the last call, are its prompt and output tokens known, and their logarithms


def width(agents: int) -> int:
    """Numbers in a vector for a vocabulary of `agents`."""
    known = agents + 2  # unknown agent, nothing there
    return _RECENT * known + _VISITS * (known + 2) + 4 * (agents + 1) + 3 * (_ONE_HOT + 1) + 3 + LENGTHS


def blocks(agents: int) -> list[int]:
    """Where, in a vector, slot 0 of each group of per-agent slots is; slot `agents` is the unknown agent's."""
    known = agents + 2
    starts = [i * known for i in range(_RECENT)]
    starts += [_RECENT * known + i * (known + 2) for i in range(_VISITS)]
    after = _RECENT * known + _VISITS * (known + 2)
    return starts + [after + i * (agents + 1) for i in range(4)]


def hidden(agents: int, agent: int) -> npt.NDArray[np.int64]:
    """[width(agents)] the order of a vector's numbers in which `agent` and the unknown agent have changed places:
    the vector as it would be had that agent never been trained on."""
    order = np.arange(width(agents))
    for start in blocks(agents):
        order[[start + agent, start + agents]] = order[[start + agents, start + agent]]
    return order


class PathFeatures:
    """Follows one run. `push` once a call; `vector` is what is known after the last one."""

    def __init__(self, agents: Sequence[str]) -> None:
        self._index = {agent: i for i, agent in enumerate(agents)}
        self._known = len(agents)
        self._recent = [self._known + 1] * _RECENT  # newest first
        self._visits = [(self._known + 1, 0)] * _VISITS
        self._calls = np.zeros(self._known + 1, np.float32)
        self._visited = np.zeros(self._known + 1, np.float32)
        self._last = np.full(self._known + 1, -1.0, np.float32)
        self._length = [0.0] * LENGTHS
        self._total = 0

    @property
    def calls(self) -> int:
        return self._total

    def push(self, agent: str, prompt_tokens: int | None = None, output_tokens: int | None = None) -> None:
        """A call of `agent`; tokens None while they are not known (`correct` adds them)."""
        column = self._index.get(agent, self._known)
        self._total += 1
        if self._visits[0][0] == column:
            self._visits[0] = (column, self._visits[0][1] + 1)
        else:
            self._visits = [(column, 1), *self._visits[:-1]]
            self._visited[column] += 1
        self._recent = [column, *self._recent[:-1]]
        self._calls[column] += 1
        self._last[column] = self._total
        self._length = [0.0] * LENGTHS
        self.correct(prompt_tokens, output_tokens)

    def correct(self, prompt_tokens: int | None, output_tokens: int | None) -> None:
        """Tokens of the last call, once they are known."""
        if prompt_tokens is not None:
            self._length[:2] = [1.0, math.log1p(prompt_tokens) / 8.0]
        if output_tokens is not None:
            self._length[2:] = [1.0, math.log1p(output_tokens) / 8.0]

    def copy(self) -> "PathFeatures":
        twin = PathFeatures.__new__(PathFeatures)
        twin.__dict__.update(self.__dict__)
        twin._recent, twin._visits, twin._length = [*self._recent], [*self._visits], [*self._length]
        twin._calls, twin._visited, twin._last = self._calls.copy(), self._visited.copy(), self._last.copy()
        return twin

    def earlier(self) -> Floats:
        """[agents + 1] how often each agent, the unknown one last, was called before the current call."""
        before = self._calls.copy()
        if self._total:
            before[self._recent[0]] -= 1
        return before

    @property
    def current(self) -> int:
        """Column of the last call's agent; that of the unknown agent before the first call."""
        return min(self._recent[0], self._known)

    def vector(self) -> Floats:
        """[width(agents)]"""
        known = self._known + 2
        out = np.zeros(width(self._known), np.float32)
        for i, column in enumerate(self._recent):
            out[i * known + column] = 1.0
        at = _RECENT * known
        for column, calls in self._visits:
            out[at + column] = 1.0
            out[at + known] = math.log1p(calls)
            out[at + known + 1] = calls / 10.0
            at += known + 2
        ever = self._last >= 0
        since = np.log1p(self._total - self._last)
        for block in (np.log1p(self._calls), np.log1p(self._visited), np.where(ever, since, 0.0), ever):
            out[at : at + self._known + 1] = block
            at += self._known + 1
        current = self._recent[0]
        visited = int(self._visited[current]) if current <= self._known else 0
        for number in (self._visits[0][1], visited, self._total):
            out[at + min(number, _ONE_HOT)] = 1.0
            at += _ONE_HOT + 1
        out[at : at + 3] = (math.log1p(self._total), self._total / 50.0, float(self._visited.sum()) / 20.0)
        out[at + 3 :] = self._length
        return out


def path_features(
    agents: Sequence[str], path: Sequence[str], prompt_tokens: Sequence[int], output_tokens: Sequence[int]
) -> Floats:
    """[calls, width(len(agents))] of a finished run; row t is what was known when call t had ended."""
    follow = PathFeatures(agents)
    rows = np.empty((len(path), width(len(agents))), np.float32)
    for i, (agent, prompt, output) in enumerate(zip(path, prompt_tokens, output_tokens, strict=True)):
        follow.push(agent, int(prompt), int(output))
        rows[i] = follow.vector()
    return rows

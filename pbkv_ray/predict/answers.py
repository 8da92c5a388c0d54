"""What the length of an answer says about who is called next: learned, and applied to a forecast at the call's end.

A verifier that agrees is brief or long, a coder that gives up is short, a selector that names one agent writes other
numbers of tokens than for another. So every forecast made at the start of a call is looked at again at its end:

    P(call k is by j | path, length) ~ P(call k is by j | path) P(length | agent, call k is by j) / P(length | agent)

for each step k directly, END included: the path and the length are taken for independent given j. On the public traces
that is worth 1 to 7 points of top-1 at the first step, on every trace (tests/replay/LOG.md).
"""

import math
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from pbkv_ray.core.forecast import Array, Forecast

LENGTHS = 12  # classes of length, of equal ratio: 1.5 per factor e
_TRUST = 10.0  # observations that "the length says nothing" is worth
_MEMORY = 20_000  # observations of an agent, of all steps, after which older ones fade


def length_class(tokens: int) -> int:
    return min(LENGTHS - 1, int(1.5 * math.log1p(max(0, tokens))))


class _Workflow:
    """counts: [agent, who was called, step, length class]; column 0 of "who" is END's, agents come behind it."""

    def __init__(self, horizon: int) -> None:
        self.columns: dict[str | None, int] = {None: 0}
        self.counts = np.zeros((4, 4, horizon, LENGTHS), np.float32)
        self.seen = np.zeros(4, np.int64)  # observations of each agent
        self.tables: dict[int, tuple[int, Array]] = {}  # agent -> what `seen` was then, see `likelier`
        self._rows: tuple[tuple[str, ...], npt.NDArray[np.intp]] = (), np.zeros(1, np.intp)

    def column(self, name: str, most: int) -> int | None:
        """The place of an agent; None beyond the bound."""
        known = self.columns.get(name)
        if known is None and len(self.columns) < most:
            known = self.columns[name] = len(self.columns)
            self._rows = (), np.zeros(1, np.intp)
            if known == len(self.seen):
                self.counts = np.pad(self.counts, [(0, known), (0, known), (0, 0), (0, 0)])
                self.seen = np.pad(self.seen, (0, known))
                self.tables.clear()
        return known

    def rows(self, agents: tuple[str, ...]) -> npt.NDArray[np.intp]:
        """Where in a table the columns of a forecast are, END's last; -1 for strangers."""
        if self._rows[0] != agents:  # forecasts of a workflow have the same agents, but for new ones
            self._rows = agents, np.array([*(self.columns.get(name, -1) for name in agents), 0], np.intp)
        return self._rows[1]

    def likelier(self, agent: int) -> Array:
        """[length class, who + 1, step] P(length | who follows) / P(length); the last row, ones, is for strangers."""
        # It moves little once much was seen: look again after 3 % more observations.
        seen = int(self.seen[agent])
        known = self.tables.get(agent)
        if known is None or seen > known[0] + known[0] // 32:
            counts = self.counts[agent]
            usual = counts.sum(0)  # [step, length class]
            expected = (usual + 1.0 / LENGTHS) / (usual.sum(-1, keepdims=True) + 1.0)
            table = (counts / expected + _TRUST) / (counts.sum(-1, keepdims=True) + _TRUST)
            table = np.pad(table, [(0, 1), (0, 0), (0, 0)], constant_values=1.0).transpose(2, 0, 1)
            known = self.tables[agent] = seen, table
        return known[1]


class AnswerLengths:
    """Bounded: agents beyond `max_agents` of a workflow, and workflows not used lately, are not told apart by what they
    answer. Not thread-safe."""

    def __init__(self, horizon: int = 10, max_agents: int = 31, max_workflows: int = 64) -> None:
        """A workflow takes a megabyte at most."""
        self._horizon, self._most, self._max_workflows = horizon, 1 + max_agents, max_workflows
        self._workflows: OrderedDict[str, _Workflow] = OrderedDict()

    def observe(
        self, workflow: str, history: Sequence[str], lengths: Sequence[int | None], following: str | None
    ) -> None:
        """After `history` the run called `following`, or ended (None). `lengths`: output tokens of its last calls, the
        last one's last; None where they are not known."""
        known = self._workflows.get(workflow)
        if known is None:
            known = self._workflows[workflow] = _Workflow(self._horizon)
            if len(self._workflows) > self._max_workflows:
                self._workflows.popitem(last=False)
        self._workflows.move_to_end(workflow)
        who = 0 if following is None else known.column(following, self._most)
        agents, steps, classes = [], [], []
        for step in range(min(self._horizon, len(history), len(lengths))):
            tokens, agent = lengths[-1 - step], known.column(history[-1 - step], self._most)
            if tokens is not None and agent is not None and who is not None:
                agents.append(agent)
                steps.append(step)
                classes.append(length_class(tokens))
        if agents:
            known.counts[agents, who, steps, classes] += 1.0  # every step once: no place twice
            np.add.at(known.seen, agents, 1)
            last = agents[0]
            if known.seen[last] > _MEMORY:
                known.counts[last] *= 0.5
                known.seen[last] //= 2
                known.tables.pop(last, None)

    def refined(self, workflow: str, agent: str, tokens: int, forecast: Forecast) -> Forecast:
        """`forecast`, made when the run called `agent`, now that it has answered with so many tokens. Its waits stay
        those of the call's start."""
        known = self._workflows.get(workflow)
        column = None if known is None else known.columns.get(agent)
        if known is None or column is None or not known.seen[column]:
            return forecast
        steps = min(self._horizon, len(forecast.step))
        step = forecast.step.copy()
        step[:steps] *= known.likelier(column)[length_class(tokens)][known.rows(forecast.agents)].T[:steps]
        return Forecast(forecast.agents, step / step.sum(1, keepdims=True), forecast.wait_s)

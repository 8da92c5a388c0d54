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
from dataclasses import dataclass, field

import numpy as np

from pbkv_ray.core.forecast import Array, Forecast

LENGTHS = 12  # classes of length, of equal ratio: 1.5 per factor e
_TRUST = 10.0  # observations that "the length says nothing" is worth
_MEMORY = 20_000  # observations of an agent, of all steps, after which older ones fade


def length_class(tokens: int) -> int:
    return min(LENGTHS - 1, int(1.5 * math.log1p(max(0, tokens))))


class _Agent:
    """What followed the answers of one agent. `counts`: [who was called (END first), step, length class]."""

    def __init__(self, horizon: int, columns: int) -> None:
        self.counts = np.zeros((columns, horizon, LENGTHS), np.float32)
        self._seen = self._seen_at_table = 0
        self._table: Array | None = None

    def widen(self, columns: int) -> None:
        if len(self.counts) < columns:
            self.counts = np.pad(self.counts, [(0, columns - len(self.counts)), (0, 0), (0, 0)])
            self._table = None

    def observe(self, column: int, step: int, tokens: int) -> None:
        self._seen += 1
        if self._seen > _MEMORY:
            self.counts *= 0.5
            self._seen = self._seen_at_table = self._seen // 2
        self.counts[column, step, length_class(tokens)] += 1.0

    def likelier(self) -> Array:
        """[length class, who + 1, step] P(length | who follows) / P(length); the last row, ones, is for strangers."""
        # It moves little once much was seen: look again after 3 % more observations.
        if self._table is None or self._seen > self._seen_at_table + self._seen_at_table // 32:
            usual = self.counts.sum(0)  # [step, length class]
            expected = (usual + 1.0 / LENGTHS) / (usual.sum(-1, keepdims=True) + 1.0)
            table = (self.counts / expected + _TRUST) / (self.counts.sum(-1, keepdims=True) + _TRUST)
            self._table = np.pad(table, [(0, 1), (0, 0), (0, 0)], constant_values=1.0).transpose(2, 0, 1)
            self._seen_at_table = self._seen
        return self._table


@dataclass(slots=True)
class _Workflow:
    columns: dict[str | None, int] = field(default_factory=lambda: {None: 0})
    agents: dict[str, _Agent] = field(default_factory=dict)


class AnswerLengths:
    """Bounded: agents beyond `max_agents` of a workflow, and workflows not used lately, are not told apart by what they
    answer. Not thread-safe."""

    def __init__(self, horizon: int = 10, max_agents: int = 32, max_workflows: int = 256) -> None:
        self._horizon, self._max_agents, self._max_workflows = horizon, max_agents, max_workflows
        self._workflows: OrderedDict[str, _Workflow] = OrderedDict()

    def observe(
        self, workflow: str, history: Sequence[str], lengths: Sequence[int | None], following: str | None
    ) -> None:
        """After `history` the run called `following`, or ended (None). `lengths`: output tokens of its last calls, the
        last one's last; None where they are not known."""
        known = self._workflows.get(workflow)
        if known is None:
            known = self._workflows[workflow] = _Workflow()
            if len(self._workflows) > self._max_workflows:
                self._workflows.popitem(last=False)
        self._workflows.move_to_end(workflow)
        column = self._column(known, following)
        if column is None:
            return
        for step in range(min(self._horizon, len(history), len(lengths))):
            agent, tokens = history[-1 - step], lengths[-1 - step]
            if tokens is not None and self._column(known, agent) is not None:
                known.agents[agent].observe(column, step, tokens)

    def refined(self, workflow: str, agent: str, tokens: int, forecast: Forecast) -> Forecast:
        """`forecast`, made when the run called `agent`, now that it has answered with so many tokens."""
        known = self._workflows.get(workflow)
        seen = None if known is None else known.agents.get(agent)
        if known is None or seen is None:
            return forecast
        steps = min(self._horizon, len(forecast.step))
        rows = [known.columns.get(name, -1) for name in forecast.agents]
        rows.append(known.columns[None])
        step = forecast.step.copy()
        step[:steps] *= seen.likelier()[length_class(tokens), rows, :steps].T
        return Forecast(forecast.agents, step / step.sum(1, keepdims=True), forecast.wait_s)

    def _column(self, known: _Workflow, name: str | None) -> int | None:
        """The place of an agent, or of END; a new agent gets one while there are any."""
        column = known.columns.get(name)
        if column is None and name is not None and len(known.columns) <= self._max_agents:
            column = known.columns[name] = len(known.columns)
            places = max(4, 1 << column.bit_length())
            for seen in known.agents.values():
                seen.widen(places)
            known.agents[name] = _Agent(self._horizon, places)
        return column

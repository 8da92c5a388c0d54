"""Variable-order transition counts: the forecast from the first run on, and the baseline for every model.

For each context (the last 0, 1, ... `order` agents of a run, the run's beginning included) and each step k one row
counts which agent made call k after it, or that the run ended there. Rows of longer contexts back off to shorter
ones, and the shortest to the LangGraph graph's own edges. Counting every step directly needs no Markov assumption
and costs one gather per forecast; propagating one-step counts was worse on the traces (tests/replay/LOG.md).
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pbkv_ray.core.forecast import Array, Forecast
from pbkv_ray.errors import ConfigError
from pbkv_ray.predict.waits import Waits

END = 0  # internal column of END: first, so that agents can be added behind it
_BEGIN = -1  # stands before a run's first agent
_Context = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CountsOptions:
    """`strength[min(j, len - 1)]` is the weight, in observations, of the shorter context in one of j agents."""

    order: int = 8
    horizon: int = 10
    strength: tuple[float, ...] = (2.0, 4.0)
    graph_trust: float = 0.9  # share of the graph's edges in the prior; the rest is uniform (`Command(goto=...)`)
    max_contexts: int = 20_000  # per workflow
    max_workflows: int = 256
    max_agents: int = 256  # per workflow

    def __post_init__(self) -> None:
        for name in ("order", "horizon", "max_contexts", "max_workflows", "max_agents"):
            if getattr(self, name) < 1:
                raise ConfigError(f"CountsOptions.{name} is {getattr(self, name)}; it must be at least 1")
        if not self.strength or min(self.strength) <= 0:
            raise ConfigError(f"CountsOptions.strength is {self.strength}; it needs numbers above zero")
        if not 0 <= self.graph_trust < 1:
            raise ConfigError(f"CountsOptions.graph_trust is {self.graph_trust}; it must be in [0, 1)")


class VariableOrderCounts:
    """`core.forecast.Predictor` by counting: online, per workflow, bounded. Not thread-safe.

    `dropped` counts what the bounds threw away: "workflows", "contexts", "agents".
    """

    def __init__(self, options: CountsOptions | None = None) -> None:
        self.options = options or CountsOptions()
        self.dropped = {"workflows": 0, "contexts": 0, "agents": 0}
        self._workflows: OrderedDict[str, _Workflow] = OrderedDict()

    def prior(self, workflow: str, agents: Sequence[str], edges: Iterable[tuple[str, str]]) -> None:
        """Learn the graph of `workflow`; idempotent, cheap when nothing changed.

        Edges may pass through graph nodes that are no agents, `__start__` and `__end__` included: what counts is
        which agent comes next.
        """
        self._workflow(workflow).set_graph(tuple(agents), tuple(edges))

    def observe(self, workflow: str, history: Sequence[str], following: str | None) -> None:
        """After `history` (oldest first, [] before the first call) the run called `following`, or ended (None)."""
        self._workflow(workflow).observe(history, following)

    def observe_wait(self, workflow: str, agent: str, following: str, seconds: float) -> None:
        """A call of `following` started `seconds` after its run's call of `agent` had started."""
        self._workflow(workflow).waits.observe(agent, following, seconds)

    def waits(self, workflow: str) -> Waits | None:
        known = self._workflows.get(workflow)
        return known.waits if known else None

    def forecast(self, workflow: str, history: Sequence[str], horizon: int) -> Forecast | None:
        """[min(horizon, options.horizon)] steps; None for a workflow without graph and observations."""
        known = self._workflows.get(workflow)
        if known is None or not known.names:
            return None
        step = known.step(history)[:horizon]
        agents = tuple(known.names)
        wait = known.waits.expected(history[-1] if history else None, agents, step)
        return Forecast(agents, step, wait)

    def _workflow(self, name: str) -> "_Workflow":
        known = self._workflows.get(name)
        if known is None:
            known = self._workflows[name] = _Workflow(self.options, self.dropped)
            if len(self._workflows) > self.options.max_workflows:
                self._workflows.popitem(last=False)
                self.dropped["workflows"] += 1
        else:
            self._workflows.move_to_end(name)
        return known


class _Workflow:
    """The rows of one workflow. Column END, then the agents in the order in which they appeared."""

    def __init__(self, options: CountsOptions, dropped: dict[str, int]) -> None:
        self._options = options
        self._dropped = dropped
        self.names: list[str] = []
        self.waits = Waits()
        self._index: dict[str, int] = {}
        self._rows: dict[_Context, int] = {}
        self._paths: dict[_Context, npt.NDArray[np.intp]] = {}  # longest context -> the rows of all its suffixes
        self._counts = np.zeros((64, options.horizon, 8), np.float32)
        self._graph: tuple[tuple[str, ...], tuple[tuple[str, str], ...]] = ((), ())
        self._prior: Array | None = None  # [1 + agents (0: before the first), horizon, columns]
        strength = options.strength
        self._strength = [strength[min(j, len(strength) - 1)] for j in range(options.order + 2)]

    def set_graph(self, agents: tuple[str, ...], edges: tuple[tuple[str, str], ...]) -> None:
        if not agents or self._graph == (agents, edges):
            return
        self._graph = (agents, edges)
        for agent in agents:
            self._column(agent)
        self._prior = None

    def observe(self, history: Sequence[str], following: str | None) -> None:
        options = self._options
        column = END if following is None else self._column(following)
        recent = self._encode(history[-(options.order + options.horizon) :], len(history))
        if column is None:
            return
        calls = len(history)
        rows: list[npt.NDArray[np.intp]] = []
        steps: list[int] = []
        for k in range(
            min(options.horizon, calls + 1)
        ):  # the context before call `calls - k`, seen k steps earlier
            path = self._path(recent[: len(recent) - k])
            rows.append(path)
            steps += [k] * len(path)
        # One row never meets one step twice, so that fancy indexing counts each of them.
        self._counts[np.concatenate(rows), steps, column] += 1.0
        if len(self._rows) > options.max_contexts:
            self._shrink()

    def step(self, history: Sequence[str]) -> Array:
        """[horizon, agents + 1], END last."""
        width = len(self.names) + 1
        recent = self._encode(history[-self._options.order :], len(history))
        context = recent[-self._options.order :]
        probability = self._base(context, width)
        graph_known = bool(self._graph[0])
        rows = [
            row
            for j in range(len(context) + 1)
            if (row := self._rows.get(context[len(context) - j :])) is not None
        ]
        if rows:
            counts = self._counts[rows, :, :width].astype(np.float64)
            totals = counts.sum(2, keepdims=True)
            for j in range(1 if graph_known and len(rows) > 1 else 0, len(rows)):
                strength = self._strength[j]
                probability = (counts[j] + strength * probability) / (totals[j] + strength)
        return np.concatenate((probability[:, 1:], probability[:, :1]), axis=1)

    def _column(self, agent: str) -> int | None:
        column = self._index.get(agent)
        if column is None:
            if len(self.names) >= self._options.max_agents:
                self._dropped["agents"] += 1
                return None
            self.names.append(agent)
            column = self._index[agent] = len(self.names)
            if column >= self._counts.shape[2]:
                self._counts = np.concatenate((self._counts, np.zeros_like(self._counts)), axis=2)
            self._prior = None
        return column

    def _encode(self, recent: Sequence[str], calls: int) -> _Context:
        """The columns of `recent`, after _BEGIN if these are all of the run's `calls`; unknown agents are END."""
        encoded = tuple(self._index.get(agent, END) for agent in recent)
        return encoded if calls > len(encoded) else (_BEGIN, *encoded)

    def _path(self, recent: _Context) -> npt.NDArray[np.intp]:
        longest = recent[-self._options.order :]
        path = self._paths.get(longest)
        if path is None:
            made = [self._row(longest[len(longest) - j :]) for j in range(len(longest) + 1)]
            path = self._paths[longest] = np.array(made, np.intp)
        return path

    def _row(self, context: _Context) -> int:
        row = self._rows.get(context)
        if row is None:
            row = self._rows[context] = len(self._rows)
            if row >= len(self._counts):
                self._counts = np.concatenate((self._counts, np.zeros_like(self._counts)))
        return row

    def _shrink(self) -> None:
        """Halve all counts and forget the contexts seen least, half of them: old behaviour fades with use."""
        totals = self._counts[: len(self._rows), 0].sum(1) / 2
        # A suffix is seen at least as often as what it is a suffix of, and comes first among equals.
        order = sorted(self._rows.items(), key=lambda item: (-totals[item[1]], len(item[0])))
        kept = order[: max(1, self._options.max_contexts // 2)]
        counts = self._counts[[row for _, row in kept]] / 2
        self._dropped["contexts"] += len(order) - len(kept)
        self._rows = {context: row for row, (context, _) in enumerate(kept)}
        self._paths = {}
        self._counts = np.zeros((max(64, len(kept) * 2), *counts.shape[1:]), np.float32)
        self._counts[: len(kept)] = counts

    def _base(self, context: _Context, width: int) -> Array:
        """[horizon, width]: what is expected before anything was counted."""
        if not self._graph[0]:
            return np.full((self._options.horizon, width), 1.0 / width)
        if self._prior is None:
            hops = first_agents(self.names, *self._graph)
            hops = self._options.graph_trust * hops + (1 - self._options.graph_trust) / width
            self._prior = propagate(hops, self._options.horizon)
        last = context[-1] if context else END
        return self._prior[max(0, last)]


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

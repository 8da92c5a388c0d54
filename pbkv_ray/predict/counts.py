"""Variable-order transition counts: the forecast from the first run on, and the baseline for every model.

A *context* is something a run has in common with others: its last agents (the beginning of the run included), its
last visits (consecutive calls of one agent) with their lengths, how often it has visited the current agent. Each
context has one row per step k: which agent made call k after it, or that the run ended there. Within a family of
contexts longer ones back off to shorter ones and those to the LangGraph graph's own edges; the families are mixed
log-linearly with weights learned online. Every step is counted directly: a forecast is one gather. Propagating the
one-step counts is a little better far ahead where runs are few, at many times the cost (tests/replay/LOG.md).
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pbkv_ray.core.forecast import Array, Forecast
from pbkv_ray.errors import ConfigError
from pbkv_ray.predict.positions import ContextPath, Position
from pbkv_ray.predict.prior import first_agents, propagate
from pbkv_ray.predict.waits import Waits

END = 0  # internal column of END: first, so that agents can be added behind it
# Beyond all columns: what stands before a run's first agent, and the tags of the families' contexts. A context's key is
# the hash of the key that it extends and of what it adds: ints, so that it is the same in every process.
_BEGIN, _SUFFIX, _VISITS, _VISITED = range(1 << 30, (1 << 30) + 4)
CHECK_EVERY = 256  # observations
POSITION_CELLS = 1_000  # what a remembered position costs, in cells of four bytes, about
_FLOOR = 1e-6  # least probability of a family before mixing


@dataclass(frozen=True, slots=True)
class CountsOptions:
    """`strength` is the weight, in observations, of the next shorter context: of the shortest two, and beyond."""

    order: int = 8  # agents of the longest suffix
    visits: int = 4  # earlier visits of the longest visit context; 0 leaves the families of visits out
    horizon: int = 10
    strength: tuple[float, float] = (2.0, 4.0)
    learning_rate: float = 0.1  # of the families' weights
    graph_trust: float = 0.9  # share of the graph's edges in the prior; the rest is uniform (`Command(goto=...)`)
    max_contexts: int = 20_000  # per workflow
    max_positions: int = 4_096  # per workflow: paths remembered so that a run's next call costs one step
    max_workflows: int = 256
    max_agents: int = 256  # per workflow
    max_cells: int = 32_000_000  # counts (float32), of one workflow and of all: names are the clients' to choose

    def __post_init__(self) -> None:
        for name in ("order", "horizon", "max_contexts", "max_positions", "max_workflows", "max_agents", "max_cells"):
            if getattr(self, name) < 1:
                raise ConfigError(f"CountsOptions.{name} is {getattr(self, name)}; it must be at least 1")
        if min(self.strength) <= 0:
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
        self._observed = 0

    def prior(self, workflow: str, agents: Sequence[str], edges: Iterable[tuple[str, str]]) -> None:
        """Learn the graph of `workflow`; idempotent, cheap when nothing changed.

        Edges may pass through graph nodes that are no agents, `__start__` and `__end__` included: what counts is
        which agent comes next.
        """
        self._workflow(workflow).set_graph(tuple(agents), tuple(edges))

    def observe(self, workflow: str, history: Sequence[str], following: str | None, run_id: str = "") -> None:
        """After `history` (oldest first, [] before the first call) the run called `following`, or ended (None)."""
        self._workflow(workflow).observe(history, following)
        self._observed += 1
        if self._observed % CHECK_EVERY == 0:
            self._bound()

    def observe_wait(self, workflow: str, agent: str, following: str, seconds: float) -> None:
        """A call of `following` started `seconds` after its run's call of `agent` had started."""
        self._workflow(workflow).waits.observe(agent, following, seconds)

    def transitions(self, workflow: str) -> dict[str, dict[str, float]]:
        """agent -> {next agent: how often}, as far as counted; without END."""
        known = self._workflows.get(workflow)
        return known.transitions() if known else {}

    def waits(self, workflow: str) -> Waits | None:
        known = self._workflows.get(workflow)
        return known.waits if known else None

    def forecast(self, workflow: str, history: Sequence[str], horizon: int) -> Forecast | None:
        """[min(horizon, options.horizon)] steps; None for a workflow without graph and observations."""
        return self.forecasts(workflow, [history], horizon)[0]

    def forecasts(self, workflow: str, histories: Sequence[Sequence[str]], horizon: int) -> list[Forecast | None]:
        """`forecast` of many runs of one workflow at once: little more than the cost of one."""
        known = self._workflows.get(workflow)
        if known is None or not known.names or not histories:
            return [None] * len(histories)
        steps = known.steps(histories)[:, :horizon]
        agents = tuple(known.names)
        waits = known.waits.expected([history[-1] if history else None for history in histories], agents, steps)
        return [Forecast(agents, step, None if waits is None else waits[n]) for n, step in enumerate(steps)]

    def _bound(self) -> None:
        """The workflow used least recently goes first; the one used last stays, which has a bound of its own."""
        cells = sum(known.cells for known in self._workflows.values())
        while cells > self.options.max_cells and len(self._workflows) > 1:
            cells -= self._workflows.popitem(last=False)[1].cells
            self.dropped["workflows"] += 1

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
        # Row 0 stays empty: it stands for a context that a position does not have.
        self._rows: dict[int, int] = {}
        self._lengths = [0]  # row -> length of its context
        self._counts = np.zeros((64, options.horizon, 8), np.float32)
        self._totals = np.zeros((64, options.horizon), np.float32)  # sums of _counts over the columns
        self._positions: OrderedDict[tuple[str, ...], Position] = OrderedDict()
        self._graph: tuple[tuple[str, ...], tuple[tuple[str, str], ...]] = ((), ())
        self._prior: npt.NDArray[np.float32] | None = None  # [1 + agents (0: before the first), horizon, columns]
        families = 3 if options.visits else 1
        self._shape = (families, max(options.order + 1, options.visits + 3))
        strength = np.full(self._shape[1], options.strength[1], np.float32)
        strength[:2] = options.strength[0]
        self._strength = strength[:, None]
        self._weight = np.full((families, options.horizon), 1.0 / families)
        self._slope = np.full((families, options.horizon), 1e-2)  # sums of squared gradients (AdaGrad)
        self._turn = 0

    def set_graph(self, agents: tuple[str, ...], edges: tuple[tuple[str, str], ...]) -> None:
        if not agents or self._graph == (agents, edges):
            return
        self._graph = (agents, edges)
        for agent in agents:
            self._column(agent)
        self._prior = None

    def observe(self, history: Sequence[str], following: str | None) -> None:
        column = END if following is None else self._column(following)
        paths = self._position(history).paths
        if column is None:
            return
        self._weigh(paths, column)
        rows = np.array([path.rows for path in paths])
        steps = np.arange(len(paths))[:, None]
        # Families share their short contexts: fancy indexing counts such a row once, which is what is meant.
        self._counts[rows, steps, column] += 1.0
        self._totals[rows, steps] += 1.0
        self._counts[0] = self._totals[0] = 0.0
        if len(self._rows) > self._max_rows:
            self._shrink()

    @property
    def cells(self) -> int:
        return self._counts.size + POSITION_CELLS * len(self._positions)

    @property
    def _max_rows(self) -> int:
        width = self._counts.shape[1] * self._counts.shape[2]
        return min(self._options.max_contexts, max(1, self._options.max_cells // (2 * width)))

    def transitions(self) -> dict[str, dict[str, float]]:
        found: dict[str, dict[str, float]] = {}
        for agent, column in self._index.items():
            row = self._rows.get(hash((_SUFFIX, column)))
            if row is not None:
                counts = self._counts[row, 0, 1 : len(self.names) + 1]
                found[agent] = {name: float(n) for name, n in zip(self.names, counts, strict=True) if n > 0}
        return found

    def steps(self, histories: Sequence[Sequence[str]]) -> Array:
        """[histories, horizon, agents + 1], END last."""
        paths = [self._position(history).paths[0] for history in histories]
        logs = np.log(self._families(paths, slice(None)))
        mixed = np.einsum("fk,nfkw->nkw", self._weight.astype(np.float32), logs)
        likely = _softmax(mixed)
        return np.concatenate((likely[..., 1:], likely[..., :1]), axis=-1)

    def _families(self, paths: Sequence[ContextPath], steps: slice) -> npt.NDArray[np.float32]:
        """[paths, families, steps, columns]: what each family of contexts expects after each path.

        Backing off from context to context is linear, so that all lengths are summed at once: each has the weight
        that its own count earns, times what all longer ones left over.
        """
        width, (families, lengths) = len(self.names) + 1, self._shape
        rows = np.array([path.rows for path in paths], np.intp).reshape(-1, lengths)
        if self._graph[0]:
            rows[:, 0] = 0  # the graph knows more than the mean over all contexts
        weight = 1.0 / (np.take(self._totals, rows, axis=0)[..., steps] + self._strength)
        left = self._strength * weight
        beyond = np.ones_like(left[:, 0])
        for j in range(lengths - 1, -1, -1):
            weight[:, j] *= beyond
            beyond *= left[:, j]
        counted = np.einsum("njkw,njk->nkw", np.take(self._counts, rows, axis=0)[..., steps, :], weight)
        probability = counted.reshape(len(paths), families, *counted.shape[1:])[..., :width]
        base = self._base(width)[[path.current for path in paths], steps]
        probability += beyond.reshape(len(paths), families, -1, 1) * base[:, None]
        return np.maximum(probability, _FLOOR)

    def _weigh(self, paths: tuple[ContextPath, ...], column: int) -> None:
        """One gradient step on the log-likelihood, for the weights of one step in turn (before it is counted)."""
        if len(self._weight) == 1:
            return
        self._turn += 1
        k = self._turn % len(paths)
        logs = np.log(self._families([paths[k]], slice(k, k + 1))[0, :, 0]).astype(np.float64)
        probability = _softmax(self._weight[:, k] @ logs)
        gradient = logs[:, column] - logs @ probability
        # The sum forgets, so that the weights keep following what runs do.
        self._slope[:, k] = 0.999 * self._slope[:, k] + gradient**2
        self._weight[:, k] += self._options.learning_rate * gradient / np.sqrt(self._slope[:, k])
        np.clip(self._weight[:, k], -0.5, 2.0, out=self._weight[:, k])

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

    def _position(self, history: Sequence[str]) -> Position:
        key = tuple(history)
        known = self._positions.get(key)
        if known is not None:
            self._positions.move_to_end(key)
            return known
        position = self._positions.get(key[:-1]) if key else None
        rest = key[-1:]
        if position is None:
            position, rest = self._begin(), key
        for agent in rest:
            position = self._advance(position, self._column(agent) or END)
        self._positions[key] = position
        if len(self._positions) > self._options.max_positions:
            self._positions.popitem(last=False)
        return position

    def _begin(self) -> Position:
        return self._placed([_SUFFIX, hash((_SUFFIX, _BEGIN))], ((_BEGIN, 0),), {}, ())

    def _advance(self, position: Position, column: int) -> Position:
        suffixes, visits, visited, paths = position
        suffixes = [_SUFFIX, *[hash((key, column)) for key in suffixes[: self._options.order]]]
        last, calls = visits[-1]
        if last == column:
            visits = (*visits[:-1], (column, calls + 1))
        else:
            visits = (*visits[-max(1, self._options.visits) :], (column, 1))
            visited = {**visited, column: visited.get(column, 0) + 1}
        return self._placed(suffixes, visits, visited, paths)

    def _placed(
        self,
        suffixes: list[int],
        visits: tuple[tuple[int, int], ...],
        visited: dict[int, int],
        paths: tuple[ContextPath, ...],
    ) -> Position:
        current, calls = visits[-1]
        families = [suffixes]
        if self._options.visits:
            key = hash((_VISITS, current, calls))
            families.append([*suffixes[:2], key])
            for visit in visits[-2::-1]:
                key = hash((key, visit[0]))
                families[1].append(key)
            key = hash((_VISITED, current, visited.get(current, 0)))
            families.append([*suffixes[:2], key, hash((key, calls))])
        rows: list[int] = []
        for keys in families:
            rows += [self._rows.get(key) or self._row(key, length) for length, key in enumerate(keys)]
            rows += [0] * (self._shape[1] - len(keys))
        path = ContextPath(rows, current if current < _BEGIN else 0)
        return Position(suffixes, visits, visited, (path, *paths[: self._options.horizon - 1]))

    def _row(self, key: int, length: int) -> int:
        row = self._rows[key] = len(self._lengths)
        self._lengths.append(length)
        if row >= len(self._counts):
            self._counts = np.concatenate((self._counts, np.zeros_like(self._counts)))
            self._totals = np.concatenate((self._totals, np.zeros_like(self._totals)))
        return row

    def _shrink(self) -> None:
        """Halve all counts and forget the contexts seen least, half of them: old behaviour fades with use."""
        seen = self._totals[:, 0]
        # A suffix is seen at least as often as what it is a suffix of, and comes first among equals.
        order = sorted(self._rows.items(), key=lambda item: (-seen[item[1]], self._lengths[item[1]]))
        kept = order[: max(1, self._max_rows // 2)]
        rows = [0, *(row for _, row in kept)]
        self._dropped["contexts"] += len(order) - len(kept)
        self._rows = {key: 1 + i for i, (key, _) in enumerate(kept)}
        self._lengths = [self._lengths[row] for row in rows]
        self._positions.clear()
        counts, totals = self._counts[rows] / 2, self._totals[rows] / 2
        self._counts = np.concatenate((counts, np.zeros_like(counts)))
        self._totals = np.concatenate((totals, np.zeros_like(totals)))

    def _base(self, width: int) -> npt.NDArray[np.float32]:
        """[width (the current agent; 0: none yet), horizon, width]: what is expected before anything was counted."""
        if self._prior is None:
            hops = np.full((width, width), 1.0 / width)
            if self._graph[0]:
                trust = self._options.graph_trust
                hops = trust * first_agents(self.names, *self._graph) + (1 - trust) * hops
            self._prior = propagate(hops, self._options.horizon).astype(np.float32)
        return self._prior


def _softmax(logits: npt.NDArray[np.floating]) -> Array:
    weights = np.exp(logits - logits.max(-1, keepdims=True)).astype(np.float64)
    return np.asarray(weights / weights.sum(-1, keepdims=True))

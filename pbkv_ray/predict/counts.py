"""Variable-order transition counts: the forecast from the first run on, and the baseline for every model.

A *context* is something a run has in common with others: its last agents (the beginning of the run included), its
last visits (consecutive calls of one agent) with their lengths, how often it has visited the current agent. Each
context has one row per step k: which agent made call k after it, or that the run ended there. Within a family of
contexts longer ones back off to shorter ones and those to the LangGraph graph's own edges; the families are mixed
log-linearly with weights learned online. Every step is counted directly. Propagating the one-step counts is a little
better far ahead where runs are few, at many times the cost (tests/replay/LOG.md).

What is done per run, context and step is compiled (`predict.kernels`), once a machine, when the first
`VariableOrderCounts` is made: that may take seconds, and no forecast has to wait for it.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, chain, repeat

import numpy as np

from pbkv_ray.core.forecast import Array, Forecast
from pbkv_ray.errors import ConfigError
from pbkv_ray.predict import kernels
from pbkv_ray.predict.answers import AnswerLengths
from pbkv_ray.predict.prior import first_agents, propagate
from pbkv_ray.predict.rows import Rows
from pbkv_ray.predict.waits import Waits

END = 0  # internal column of END: first, so that agents can be added behind it
CHECK_EVERY = 256  # observations


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
    max_workflows: int = 256
    max_agents: int = 256  # per workflow
    max_cells: int = 32_000_000  # numbers of four bytes, of one workflow and of all: names are the clients' to choose

    def __post_init__(self) -> None:
        for name in ("order", "horizon", "max_contexts", "max_workflows", "max_agents", "max_cells"):
            if getattr(self, name) < 1:
                raise ConfigError(f"CountsOptions.{name} is {getattr(self, name)}; it must be at least 1")
        if min(self.strength) <= 0:
            raise ConfigError(f"CountsOptions.strength is {self.strength}; it needs numbers above zero")
        if not 0 <= self.graph_trust < 1:
            raise ConfigError(f"CountsOptions.graph_trust is {self.graph_trust}; it must be in [0, 1)")


@dataclass(frozen=True, slots=True, eq=False)
class Expected:
    """Forecasts of some runs of one workflow: steps [runs, K, agents + 1], waits [runs, K]; see `Forecast`.

    columns: what they were made from, one history after the other, agent i being 1 + i, 0 one that has no column; ends
    [runs] where each history ends.
    """

    agents: tuple[str, ...]
    steps: Array
    waits: Array | None
    columns: kernels.Ints
    ends: kernels.Ends

    def forecasts(self) -> list[Forecast]:
        waits = repeat(None) if self.waits is None else self.waits
        return [Forecast(self.agents, step, wait) for step, wait in zip(self.steps, waits, strict=False)]


class VariableOrderCounts:
    """`core.forecast.Predictor` by counting: online, per workflow, bounded. Not thread-safe.

    `dropped` counts what the bounds threw away: "workflows", "contexts", "agents".
    """

    def __init__(self, options: CountsOptions | None = None) -> None:
        self.options = options or CountsOptions()
        self.dropped = {"workflows": 0, "contexts": 0, "agents": 0}
        self._workflows: OrderedDict[str, _Workflow] = OrderedDict()
        self._answers = AnswerLengths(self.options.horizon)
        self._observed = 0
        _compile()

    def prior(self, workflow: str, agents: Sequence[str], edges: Iterable[tuple[str, str]]) -> None:
        """Learn the graph of `workflow`; idempotent, cheap when nothing changed.

        Edges may pass through graph nodes that are no agents, `__start__` and `__end__` included: what counts is
        which agent comes next.
        """
        self._workflow(workflow).set_graph(tuple(agents), tuple(edges))

    def observe(
        self,
        workflow: str,
        history: Sequence[str],
        following: str | None,
        run_id: str = "",
        answers: Sequence[int | None] = (),
    ) -> None:
        """After `history` (oldest first, [] before the first call) the run called `following`, or ended (None)."""
        self._workflow(workflow).observe(history, following)
        if answers:
            self._answers.observe(workflow, history, answers, following)
        self._observed += 1
        if self._observed % CHECK_EVERY == 0:
            self._bound()

    def observe_wait(self, workflow: str, agent: str, following: str, seconds: float) -> None:
        """A call of `following` started `seconds` after its run's call of `agent` had started."""
        self._workflow(workflow).waits.observe(agent, following, seconds)

    def refined(self, workflow: str, agent: str, tokens: int, forecast: Forecast) -> Forecast:
        return self._answers.refined(workflow, agent, tokens, forecast)

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
        expected = self.expected(workflow, histories, horizon)
        return [None] * len(histories) if expected is None else [*expected.forecasts()]

    def expected(
        self, workflow: str, histories: Sequence[Sequence[str]], horizon: int, answers: Sequence[int | None] = ()
    ) -> Expected | None:
        """`forecasts` as whole arrays; `refined` by the output tokens of their last calls, where `answers` has them."""
        known = self._workflows.get(workflow)
        if known is None or not known.columns or not histories:
            return None
        columns, ends = known.flat(histories)
        steps = known.steps(columns, ends, horizon)
        agents = tuple(known.columns)
        for i, tokens in enumerate(answers):
            if tokens is not None:
                steps[i] = self.refined(workflow, histories[i][-1], tokens, Forecast(agents, steps[i])).step
        waits = known.waits.expected([history[-1] if history else None for history in histories], agents, steps)
        return Expected(agents, steps, waits, columns, ends)

    def _bound(self) -> None:
        """The workflow used least recently goes first; the one used last stays, which has a bound of its own."""
        cells = sum(known.rows.cells for known in self._workflows.values())
        while cells > self.options.max_cells and len(self._workflows) > 1:
            cells -= self._workflows.popitem(last=False)[1].rows.cells
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


class _Columns(dict[str, int]):
    """agent -> column, in the order in which they appeared; END's for those beyond the bound."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    def __missing__(self, agent: str) -> int:
        if len(self) >= self._most:
            return END
        column = self[agent] = len(self) + 1
        return column


class _Workflow:
    """What one workflow's runs and its graph have taught."""

    def __init__(self, options: CountsOptions, dropped: dict[str, int]) -> None:
        self._options = options
        self._dropped = dropped
        self.columns = _Columns(options.max_agents)
        self.rows = Rows(options.horizon)
        self.waits = Waits()
        self._graph: tuple[tuple[str, ...], tuple[tuple[str, str], ...]] = ((), ())
        self._prior: kernels.Floats | None = None
        self._families = 3 if options.visits else 1
        self._strength = np.full(max(options.order + 1, options.visits + 3), options.strength[1], np.float32)
        self._strength[:2] = options.strength[0]
        self._weight = np.full((self._families, options.horizon), 1.0 / self._families)
        self._slope = np.full((self._families, options.horizon), 1e-2)  # sums of squared gradients (AdaGrad)
        self._turn = 0

    def set_graph(self, agents: tuple[str, ...], edges: tuple[tuple[str, str], ...]) -> None:
        if not agents or self._graph == (agents, edges):
            return
        self._graph = (agents, edges)
        self.flat([agents])
        self._prior = None

    def observe(self, history: Sequence[str], following: str | None) -> None:
        column = END if following is None else self.columns[following]
        columns, _ = self.flat([history])
        if column == END and following is not None:
            self._dropped["agents"] += 1
            return
        base, rows, options = self._base(), self.rows, self._options
        steps = min(options.horizon, len(columns) + 1)
        places = rows.place(columns, options.order, options.visits, (steps, self._families, len(self._strength)))
        if self._families > 1:
            # The weights of one step in turn, before it is counted.
            self._turn += 1
            k = self._turn % steps
            expected = base[columns[-1 - k] if k < len(columns) else END]
            known = rows.counts, rows.totals, expected, self._strength, self._weight, self._slope
            width = len(self.columns) + 1
            kernels.weigh(places[k], self._first, k, column, width, *known, options.learning_rate)
        kernels.count(places, column, rows.counts, rows.totals)
        if len(rows) > self._max_rows:
            self._dropped["contexts"] += rows.shrink(max(1, self._max_rows // 2))

    def transitions(self) -> dict[str, dict[str, float]]:
        found: dict[str, dict[str, float]] = {}
        rows = kernels.after(len(self.columns) + 1, self.rows.slots, self.rows.keys)
        for agent, column in self.columns.items():
            if rows[column]:
                counts = self.rows.counts[rows[column], 0, 1 : len(self.columns) + 1]
                found[agent] = {name: float(n) for name, n in zip(self.columns, counts, strict=True) if n > 0}
        return found

    def steps(self, columns: kernels.Ints, ends: kernels.Ends, horizon: int) -> Array:
        """[histories, min(horizon, options.horizon), agents + 1], END last; of `flat` histories."""
        base, rows, options = self._base(), self.rows, self._options
        steps, width = min(horizon, options.horizon), rows.counts.shape[2]
        expected = np.empty((len(ends), self._families, steps, width), np.float32)
        known = self._first, rows.slots, rows.keys, rows.counts, rows.totals, base, self._strength
        kernels.expect(columns, ends, options.order, options.visits, *known, expected)
        # Logarithms and exponentials in whole arrays: numpy's are several times as fast as compiled ones.
        np.log(np.maximum(expected, kernels.FLOOR, out=expected), out=expected)
        mixed = np.empty((len(ends), steps, width), np.float32)
        kernels.mix(expected, self._weight, mixed)
        out = np.empty((len(ends), steps, len(self.columns) + 1))
        # With three logarithms of at least FLOOR, and weights from -0.5 to 2, no exponential leaves float32.
        kernels.normalise(np.exp(mixed, out=mixed), out)
        return out

    @property
    def _first(self) -> int:
        """The shortest context that counts: the graph knows more than the mean over all contexts."""
        return 1 if self._graph[0] else 0

    @property
    def _max_rows(self) -> int:
        return min(self._options.max_contexts, max(1, self._options.max_cells // (2 * self.rows.width)))

    def flat(self, histories: Sequence[Sequence[str]]) -> tuple[kernels.Ints, kernels.Ends]:
        """The histories' columns, one history after the other, and where each ends; agents that are new get theirs."""
        ends = np.fromiter(accumulate(map(len, histories)), np.int64, len(histories))
        return np.array([*map(self.columns.__getitem__, chain.from_iterable(histories))], np.int32), ends

    def _base(self) -> kernels.Floats:
        """[columns (the current agent; END's: none yet), horizon, columns of `rows`]: what is expected before anything
        was counted."""
        width = len(self.columns) + 1
        if self._prior is None or len(self._prior) != width:
            self.rows.widen(width)
            hops = np.full((width, width), 1.0 / width)
            if self._graph[0]:
                trust = self._options.graph_trust
                hops = trust * first_agents(list(self.columns), *self._graph) + (1 - trust) * hops
            self._prior = np.zeros((width, *self.rows.counts.shape[1:]), np.float32)
            self._prior[:, :, :width] = propagate(hops, self._options.horizon)
        return self._prior


@cache
def _compile() -> None:
    """Have every loop compiled, or loaded."""
    workflow = _Workflow(CountsOptions(), {})
    workflow.observe(["a"], "a")
    workflow.transitions()
    workflow.waits.observe("a", "a", 1.0)
    workflow.waits.expected(["a"], ["a"], workflow.steps(*workflow.flat([["a"]]), 1))
    workflow.rows.shrink(1)

"""Forecasts in service: counts from the first run on, and a trained net for as long as it is measurably better.

`Served` is a `core.forecast.Predictor`. A net that is wrong, slow, broken or absent leaves the counts in charge.

An event loop asks `at_once`, which never waits for a net: `begin` makes a `Job`, `Job.run` may take its time on another
thread (`predict.background`), and `finish` takes its answer in on the loop. `forecasts` does all three in one.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from time import perf_counter
from typing import get_args

import numpy as np
import numpy.typing as npt

from pbkv_ray.core.forecast import Array, CallFacts, Forecast, Predictor
from pbkv_ray.errors import ConfigError
from pbkv_ray.predict.calibration import blend, softened
from pbkv_ray.predict.counts import Expected, VariableOrderCounts
from pbkv_ray.predict.features import Floats, Paths
from pbkv_ray.predict.inference import Placed, ServedNet, Stage

__all__ = ["CallFacts", "Gate", "Job", "Served", "ServingOptions"]

_LEAST = 1e-6


@dataclass(frozen=True, slots=True)
class ServingOptions:
    judged_steps: int = 3  # how far the gate looks; what the paper's score reads
    memory: float = 300.0  # judged answers (up to `judged_steps` a call) after which half is forgotten
    least: int = 50  # judged answers before a net may join
    margin: float = 0.005  # nats per answer by which a net must be better to join, or worse to leave
    slow_s: float = 0.02  # mean time of a batch in the net beyond which it leaves
    stuck_s: float = 2.0  # a batch that takes so long is given up, and its net with it
    max_remembered: int = 8_192  # per workflow: forecasts kept until they can be judged

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if getattr(self, name) <= 0:
                raise ConfigError(f"ServingOptions.{name} is {getattr(self, name)}; it must be above zero")


@dataclass(slots=True)
class Gate:
    """Compares recent log-likelihoods (nats per judged answer, forgetting means) of counts and of both together."""

    options: ServingOptions
    judged: float = 0.0
    counts: float = 0.0
    net: float = 0.0
    open: bool = False

    def judge(self, counts: float, net: float) -> None:
        self.judged += 1
        share = max(1.0 / self.judged, 1.0 - 0.5 ** (1.0 / self.options.memory))
        self.counts += share * (counts - self.counts)
        self.net += share * (net - self.net)
        gain = self.net - self.counts
        if self.open:
            self.open = gain > -self.options.margin
        else:
            self.open = self.judged >= self.options.least and gain > self.options.margin


@dataclass(slots=True)
class _Given:
    """A batch of forecasts that waits for what really follows."""

    agents: tuple[str, ...]
    counts: Array  # [runs, K, agents + 1]
    net: Array


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """One batch for the net of one workflow. `run` reads nothing that the loop writes; one job of a workflow at a
    time."""

    workflow: str
    desk: "_Desk"
    runs: Sequence[str]
    histories: Sequence[tuple[str, ...]]
    plain: Expected
    work: Callable[[], Array]

    def run(self) -> tuple[Array, float]:
        """([runs, K, agents + 1] counts and net together, seconds it took). Raises what a broken net raises."""
        started = perf_counter()
        return self.work(), perf_counter() - started


class Served:
    """All methods belong to one thread, that of the event loop. `counters` counts what happened, for metrics."""

    def __init__(self, counts: VariableOrderCounts | None = None, options: ServingOptions | None = None) -> None:
        self.counts = counts or VariableOrderCounts()
        self.options = options or ServingOptions()
        self.counters: Counter[str] = Counter()
        self.at_once: Predictor = _AtOnce(self)
        self._desks: dict[str, _Desk] = {}
        _compile()

    def prior(self, workflow: str, agents: Sequence[str], edges: Iterable[tuple[str, str]]) -> None:
        self.counts.prior(workflow, agents, edges)

    def observe_wait(self, workflow: str, agent: str, following: str, seconds: float) -> None:
        self.counts.observe_wait(workflow, agent, following, seconds)

    def refined(self, workflow: str, agent: str, tokens: int, forecast: Forecast) -> Forecast:
        return self.counts.refined(workflow, agent, tokens, forecast)

    def install(self, workflow: str, net: ServedNet | None) -> None:
        """Replace the net of `workflow`; a new one has to prove itself again. None leaves the counts alone."""
        self._desks.pop(workflow, None)
        if net is None:
            return
        try:
            self._desks[workflow] = _Desk(net, self.options)
            self.counters["nets_installed"] += 1
        except Exception:
            self.counters["net_errors"] += 1

    def has_net(self, workflow: str) -> bool:
        return workflow in self._desks

    def observe(
        self,
        workflow: str,
        history: Sequence[str],
        following: str | None,
        run_id: str = "",
        answers: Sequence[int | None] = (),
    ) -> None:
        desk = self._desks.get(workflow)
        if desk is not None:
            desk.judge(run_id, tuple(history), following)
        self.counts.observe(workflow, history, following, answers=answers)

    def forecast(self, workflow: str, history: Sequence[str], horizon: int) -> Forecast | None:
        return self.forecasts(workflow, [history], horizon)[0]

    def forecasts(
        self,
        workflow: str,
        histories: Sequence[Sequence[str]],
        horizon: int,
        calls: Sequence[CallFacts | None] = (),
        runs: Sequence[str] = (),
    ) -> list[Forecast | None]:
        """One forecast per history; `calls` tells more about each one's last call, where it is known, `runs` whose
        they are: without it runs of the same history are taken for the same."""
        job = self.begin(workflow, histories, horizon, calls, runs)
        if job is not None:
            try:
                better = self.finish(job, *job.run())
            except Exception:
                self.drop(job, "net_errors")
            else:
                if None not in better:
                    return better
        plain = self._counted(workflow, histories, horizon, calls) if job is None else job.plain
        self.counters["forecasts_counts"] += len(histories)
        return [None] * len(histories) if plain is None else [*plain.forecasts()]

    def begin(
        self,
        workflow: str,
        histories: Sequence[Sequence[str]],
        horizon: int,
        calls: Sequence[CallFacts | None] = (),
        runs: Sequence[str] = (),
    ) -> Job | None:
        """None when counts are all there is."""
        desk = self._desks.get(workflow)
        if desk is None or not all(histories):
            return None
        plain = self._counted(workflow, histories, horizon, calls)
        if plain is None:
            return None
        own = [tuple(history) for history in histories]
        try:
            work = desk.work(plain, list(calls), partial(self.counts.transitions, workflow))
        except Exception:
            self._drop(workflow, desk, "net_errors")
            return None
        return Job(workflow, desk, list(runs) or [""] * len(own), own, plain, work)

    def _counted(
        self, workflow: str, histories: Sequence[Sequence[str]], horizon: int, calls: Sequence[CallFacts | None]
    ) -> Expected | None:
        answers = [None if call is None else call.output_tokens for call in calls]
        return self.counts.expected(workflow, histories, horizon, answers)

    def finish(self, job: Job, together: Array, seconds: float) -> list[Forecast | None]:
        """What `job.run` answered; None where counts serve, because the gate is closed or the net is unfit."""
        nothing: list[Forecast | None] = [None] * len(job.runs)
        if not np.isfinite(together).all():
            self.drop(job, "net_errors")
            return nothing
        job.desk.took(seconds)
        if job.desk.slow():
            self.drop(job, "net_slow")
            return nothing
        job.desk.remember(job.runs, job.histories, job.plain, together)
        if not job.desk.gate.open or self._desks.get(job.workflow) is not job.desk:
            return nothing
        self.counters["forecasts_net"] += len(job.runs)
        return [*replace(job.plain, steps=together).forecasts()]

    def drop(self, job: Job, why: str) -> None:
        """The net of `job` answers no more, until a new one is installed; counted as `why`."""
        self._drop(job.workflow, job.desk, why)

    def _drop(self, workflow: str, desk: "_Desk", why: str) -> None:
        self.counters[why] += 1
        if self._desks.get(workflow) is desk:
            del self._desks[workflow]

    def gates(self) -> dict[str, Gate]:
        """The gate of each workflow that has a net, for metrics."""
        return {workflow: desk.gate for workflow, desk in self._desks.items()}


class _AtOnce:
    """`Served` without waiting: it learns and judges, and forecasts by counts."""

    def __init__(self, served: Served) -> None:
        self._served = served
        self.prior = served.prior
        self.observe = served.observe
        self.observe_wait = served.observe_wait
        self.refined = served.refined

    def forecast(self, workflow: str, history: Sequence[str], horizon: int) -> Forecast | None:
        self._served.counters["forecasts_counts"] += 1
        return self._served.counts.forecast(workflow, history, horizon)

    def forecasts(self, workflow: str, histories: Sequence[Sequence[str]], horizon: int) -> list[Forecast | None]:
        self._served.counters["forecasts_counts"] += len(histories)
        return self._served.counts.forecasts(workflow, histories, horizon)


class _Desk:
    """The net of one workflow at work, and its gate; it belongs to the loop."""

    def __init__(self, net: ServedNet, options: ServingOptions) -> None:
        self.gate = Gate(options)
        self._net = net
        self._known = frozenset(net.agents)
        self._options = options
        self._added: tuple[str, ...] = ()
        self._placed = net.placed((), {})
        self._widths = net.widths()
        self._weights = {stage: net.weight(stage) for stage in get_args(Stage)}
        self._given: OrderedDict[tuple[str, tuple[str, ...]], tuple[_Given, int]] = OrderedDict()  # place in the batch
        self._mean_s = 0.0
        self._batches = 0

    def work(
        self,
        plain: Expected,
        calls: Sequence[CallFacts | None],
        transitions: Callable[[], Mapping[str, Mapping[str, float]]],
    ) -> Callable[[], Array]:
        """The net's part of a batch, bound to what it needs as it is now."""
        added = tuple(agent for agent in plain.agents if agent not in self._known)
        # Agents that the net has never seen get their place in the graph, which is renewed now and then.
        if added != self._added or (added and self._batches % 256 == 0):
            self._placed = self._net.placed(added, transitions())
        self._added = added
        own = {agent: column for column, agent in enumerate((*self._net.agents, *added))}
        columns = np.array([*(own[agent] for agent in plain.agents), len(own)])
        return partial(self._mixed, self._placed, columns, plain, calls)

    def _mixed(
        self,
        placed: Placed,
        columns: npt.NDArray[np.int64],
        plain: Expected,
        calls: Sequence[CallFacts | None],
    ) -> Array:
        """`columns`: the net's, of each of the counts' and of END."""
        known = len(self._net.agents)
        # Agents that were added, or have no column, are one to the net: the unknown.
        seen = np.minimum(np.concatenate(([known], columns)), known)
        paths = Paths.along(seen[plain.columns], plain.ends, known)
        for i, facts in enumerate(calls):
            if facts is not None:
                paths.tell(i, facts.prompt_tokens, facts.output_tokens)
        hidden = [{} if facts is None else self._fitting(facts) for facts in calls]
        stages = [self._stage(*one) for one in zip(calls, hidden, strict=True)] or ["begun"]
        weight = np.stack([self._weights[stage] for stage in stages])
        together = plain.steps.copy()
        blend(together, self._net.forecast(placed, paths, hidden), columns, weight)
        return together

    def _stage(self, facts: CallFacts | None, hidden: Mapping[str, Floats]) -> Stage:
        if facts is not None and facts.output_tokens is not None and hidden.keys() >= set(self._net.signals):
            return "finished"
        return "prefilled" if "prefill" in hidden else "begun"

    def _fitting(self, facts: CallFacts) -> dict[str, Floats]:
        """Signals of the width that the net was trained on: another model may be served by now."""
        return {
            name: np.asarray(value, np.float32)
            for name, value in facts.hidden.items()
            if self._widths.get(name) == value.shape[-1]
        }

    def remember(
        self, runs: Sequence[str], histories: Sequence[tuple[str, ...]], plain: Expected, together: Array
    ) -> None:
        batch = _Given(plain.agents, plain.steps, together)
        for n, asked in enumerate(zip(runs, histories, strict=True)):
            self._given[asked] = batch, n
        while len(self._given) > self._options.max_remembered:
            self._given.popitem(last=False)

    def judge(self, run: str, history: tuple[str, ...], following: str | None) -> None:
        for k in range(min(self._options.judged_steps, len(history))):
            given, n = self._given.get((run, history[: len(history) - k]), (None, 0))
            if given is None or k >= given.counts.shape[1]:
                continue
            if following is not None and following not in given.agents:
                continue
            column = len(given.agents) if following is None else given.agents.index(following)
            one, both = (max(float(steps[n, k, column]), _LEAST) for steps in (given.counts, given.net))
            self.gate.judge(float(np.log(one)), float(np.log(both)))

    def took(self, seconds: float) -> None:
        self._batches += 1
        self._mean_s += (seconds - self._mean_s) / min(self._batches, 64)

    def slow(self) -> bool:
        return self._batches >= 64 and self._mean_s > self._options.slow_s


@cache
def _compile() -> None:
    """Have every loop that serves a net compiled, or loaded, before a forecast waits for it."""
    Paths.of(("a",), [("a",)])
    one = np.ones((1, 1, 1))
    softened(one.astype(np.float32), np.ones(1), one)
    blend(one, one, np.zeros(1, np.int64), one[0])

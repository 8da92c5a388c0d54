"""Forecasts in service: counts from the first run on, and a trained net for as long as it is measurably better.

`Served` is a `core.forecast.Predictor`. A net that is wrong, slow, broken or absent leaves the counts in charge.
"""

import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from time import perf_counter

import numpy as np

from pbkv_ray.core.forecast import Array, Forecast
from pbkv_ray.errors import ConfigError, InputError
from pbkv_ray.predict.calibration import expand, mix
from pbkv_ray.predict.counts import VariableOrderCounts
from pbkv_ray.predict.features import Floats, PathFeatures
from pbkv_ray.predict.inference import ServedNet

_LEAST = 1e-6


@dataclass(frozen=True, slots=True)
class ServingOptions:
    judged_steps: int = 3  # how far the gate looks; what the paper's score reads
    memory: float = 300.0  # judged answers (up to `judged_steps` a call) after which half is forgotten
    least: int = 50  # judged answers before a net may join
    margin: float = 0.005  # nats per answer by which a net must be better to join, or worse to leave
    slow_s: float = 0.02  # mean time of a batch in the net beyond which it leaves
    max_remembered: int = 8_192  # per workflow: forecasts kept until they can be judged, and paths

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if getattr(self, name) <= 0:
                raise ConfigError(f"ServingOptions.{name} is {getattr(self, name)}; it must be above zero")


@dataclass(frozen=True, slots=True)
class CallFacts:
    """What is known of a run's last call, beyond its agent. `hidden`: signal name -> [width]."""

    prompt_tokens: int | None = None
    output_tokens: int | None = None
    hidden: Mapping[str, Floats] = field(default_factory=dict)


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
    """A forecast that waits for what really follows."""

    agents: tuple[str, ...]
    counts: Array  # [judged steps, agents + 1]
    net: Array


class Served:
    """Thread-safe: one lock, held for a batch at most. `counters` counts what happened, for metrics."""

    def __init__(self, counts: VariableOrderCounts | None = None, options: ServingOptions | None = None) -> None:
        self.counts = counts or VariableOrderCounts()
        self.options = options or ServingOptions()
        self.counters: Counter[str] = Counter()
        self._desks: dict[str, _Desk] = {}
        self._lock = threading.RLock()

    def prior(self, workflow: str, agents: Sequence[str], edges: Iterable[tuple[str, str]]) -> None:
        with self._lock:
            self.counts.prior(workflow, agents, edges)

    def observe_wait(self, workflow: str, agent: str, following: str, seconds: float) -> None:
        with self._lock:
            self.counts.observe_wait(workflow, agent, following, seconds)

    def install(self, workflow: str, net: ServedNet | None) -> None:
        """Replace the net of `workflow`; a new one has to prove itself again. None leaves the counts alone."""
        with self._lock:
            self._desks.pop(workflow, None)
            if net is not None:
                self._desks[workflow] = _Desk(net, self.options)
                self.counters["nets_installed"] += 1

    def observe(self, workflow: str, history: Sequence[str], following: str | None) -> None:
        with self._lock:
            desk = self._desks.get(workflow)
            if desk is not None:
                desk.judge(tuple(history), following)
            self.counts.observe(workflow, history, following)

    def forecast(self, workflow: str, history: Sequence[str], horizon: int) -> Forecast | None:
        return self.forecasts(workflow, [history], horizon)[0]

    def forecasts(
        self,
        workflow: str,
        histories: Sequence[Sequence[str]],
        horizon: int,
        calls: Sequence[CallFacts | None] = (),
    ) -> list[Forecast | None]:
        """One forecast per history; `calls` tells more about each one's last call, where it is known."""
        with self._lock:
            plain = self.counts.forecasts(workflow, histories, horizon)
            desk = self._desks.get(workflow)
            if desk is None or plain[0] is None or not all(histories):
                self.counters["forecasts_counts"] += len(plain)
                return plain
            started = perf_counter()
            try:
                desk.place(plain[0].agents, partial(self.counts.transitions, workflow))
                mixed = desk.mixed(histories, [f for f in plain if f is not None], calls)
            except Exception:
                # Whatever is wrong with a net, its workflow has counts.
                self.counters["net_errors"] += 1
                del self._desks[workflow]
                return plain
            desk.took(perf_counter() - started)
            if desk.slow():
                self.counters["net_slow"] += 1
                del self._desks[workflow]
                return plain
            self.counters["forecasts_net" if desk.gate.open else "forecasts_counts"] += len(plain)
            return list(mixed) if desk.gate.open else plain

    def gates(self) -> dict[str, Gate]:
        """The gate of each workflow that has a net, for metrics."""
        with self._lock:
            return {workflow: desk.gate for workflow, desk in self._desks.items()}


class _Desk:
    """The net of one workflow at work, and its gate."""

    def __init__(self, net: ServedNet, options: ServingOptions) -> None:
        self.gate = Gate(options)
        self._net = net
        self._options = options
        self._agents: tuple[str, ...] = ()
        self._added: tuple[str, ...] = ()
        self._states = net.states((), {})
        self._paths: OrderedDict[tuple[str, ...], PathFeatures] = OrderedDict()
        self._given: OrderedDict[tuple[str, ...], _Given] = OrderedDict()
        self._mean_s = 0.0
        self._batches = 0

    def place(self, agents: tuple[str, ...], transitions: Callable[[], Mapping[str, Mapping[str, float]]]) -> None:
        """Give agents that the net has never seen their place in the graph, and renew it now and then."""
        added = tuple(agent for agent in agents if agent not in self._net.agents)
        if added and (added != self._added or self._batches % 256 == 0):
            self._states = self._net.states(added, transitions())
        self._agents, self._added = agents, added

    def mixed(
        self, histories: Sequence[Sequence[str]], plain: Sequence[Forecast], calls: Sequence[CallFacts | None]
    ) -> list[Forecast]:
        paths = [self._path(tuple(history)) for history in histories]
        for i, facts in enumerate(calls):
            if facts is not None:
                paths[i] = paths[i].copy()
                paths[i].correct(facts.prompt_tokens, facts.output_tokens)
        hidden = [facts.hidden if facts else {} for facts in calls]
        own = self._net.forecast(self._states, paths, hidden)
        own = expand(own, (*self._net.agents, *self._added), self._agents)
        steps = min(own.shape[1], len(plain[0].step))
        counted = np.stack([forecast.step for forecast in plain])
        together = counted.copy()
        together[:, :steps] = mix(counted[:, :steps], own[:, :steps], self._net.mixture[:steps])
        if not np.isfinite(together).all():
            raise InputError("a net forecast numbers that are not finite; train it again")
        judged = self._options.judged_steps
        for history, one, both in zip(histories, counted, together, strict=True):
            self._given[tuple(history)] = _Given(self._agents, one[:judged], both[:judged])
        while len(self._given) > self._options.max_remembered:
            self._given.popitem(last=False)
        return [
            Forecast(forecast.agents, step, forecast.wait_s) for forecast, step in zip(plain, together, strict=True)
        ]

    def judge(self, history: tuple[str, ...], following: str | None) -> None:
        for k in range(min(self._options.judged_steps, len(history))):
            given = self._given.get(history[: len(history) - k])
            if given is None or k >= len(given.counts):
                continue
            if following is not None and following not in given.agents:
                continue
            column = len(given.agents) if following is None else given.agents.index(following)
            one, both = (max(float(step[k, column]), _LEAST) for step in (given.counts, given.net))
            self.gate.judge(float(np.log(one)), float(np.log(both)))

    def took(self, seconds: float) -> None:
        self._batches += 1
        self._mean_s += (seconds - self._mean_s) / min(self._batches, 64)

    def slow(self) -> bool:
        return self._batches >= 64 and self._mean_s > self._options.slow_s

    def _path(self, history: tuple[str, ...]) -> PathFeatures:
        known = self._paths.get(history)
        if known is None:
            before = self._paths.get(history[:-1])
            if before is None:
                known = PathFeatures(self._net.agents)
                rest = history
            else:
                known, rest = before.copy(), history[-1:]
            for agent in rest:
                known.push(agent)
            self._paths[history] = known
            if len(self._paths) > self._options.max_remembered:
                self._paths.popitem(last=False)
        else:
            self._paths.move_to_end(history)
        return known


class ModelFolder:
    """Watches `<root>/<any>/config.json`; `pbkv train` writes there. One reader at a time."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._seen: dict[Path, tuple[int, int]] = {}
        self.errors: dict[str, str] = {}  # folder -> why it was not loaded

    def fresh(self) -> dict[str, ServedNet]:
        """workflow -> net, of the folders that are new or changed since the last call. Reads files: not for an event
        loop. A folder that cannot be loaded is in `errors` and is tried again when it changes."""
        nets = {}
        for config in sorted(self._root.glob("*/config.json")):
            try:
                status = config.stat()
            except OSError:
                continue
            stamp = (status.st_mtime_ns, status.st_ino)
            if self._seen.get(config) == stamp:
                continue
            self._seen[config] = stamp
            name = config.parent.name
            try:
                net = ServedNet.load(config.parent)
                nets[str(net.facts.get("workflow", name))] = net
                self.errors.pop(name, None)
            except InputError as error:
                self.errors[name] = str(error)
        return nets

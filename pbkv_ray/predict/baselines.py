"""What is compared, behind one door: fit on runs of one workflow, forecast every position of others."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from pbkv_ray.core.forecast import Array
from pbkv_ray.predict.calibration import expand, fit_mixture, scale
from pbkv_ray.predict.counts import CountsOptions, VariableOrderCounts
from pbkv_ray.predict.dataset import Run, labels, vocabulary
from pbkv_ray.predict.graphsage import NetOptions
from pbkv_ray.predict.inference import Stage
from pbkv_ray.predict.train import Model, TrainOptions, begun, fit, inputs_of, labels_of, prefilled


class Fitted(Protocol):
    def probability(self, runs: Sequence[Run], agents: Sequence[str]) -> Array:
        """[calls of all runs, K, len(agents) + 1], END last; an agent it does not know has probability zero."""

    def complete(self, validation: Sequence[Run]) -> None:
        """Temperatures are fixed; what can learn from the validation runs as well does so."""


Fit = Callable[[Sequence[Run], Sequence[Run]], Fitted]  # (train, validation)


class Majority:
    """The same answer after every call: how often each agent, or END, comes k calls later."""

    def __init__(self, train: Sequence[Run], horizon: int) -> None:
        self._agents = vocabulary(train)
        label = np.concatenate([labels(run, self._agents, horizon) for run in train])
        classes = np.arange(len(self._agents) + 1)
        counts = (label[:, :, None] == classes).sum(0) + 1e-3
        self._step = counts / counts.sum(1, keepdims=True)

    def probability(self, runs: Sequence[Run], agents: Sequence[str]) -> Array:
        calls = sum(len(run.agents) for run in runs)
        return np.repeat(expand(self._step, self._agents, agents)[None], calls, 0)

    def complete(self, validation: Sequence[Run]) -> None: ...


class Counts:
    """`VariableOrderCounts` fed with whole runs, one after the other. `answered`: its forecasts at the calls' ends,
    when the lengths of their answers are known."""

    def __init__(self, train: Sequence[Run], options: CountsOptions, answered: bool = False) -> None:
        self.counts = VariableOrderCounts(options)
        self._horizon, self.answered = options.horizon, answered
        self.complete(train)

    def probability(self, runs: Sequence[Run], agents: Sequence[str]) -> Array:
        steps = []
        for run in runs:
            histories = [run.agents[: i + 1] for i in range(len(run.agents))]
            forecasts = self.counts.forecasts(run.workflow, histories, self._horizon)
            known = [f for f in forecasts if f is not None]
            if self.answered:
                tokens = run.output_tokens.tolist()
                calls = zip(run.agents, tokens, known, strict=True)
                known = [self.counts.refined(run.workflow, *call) for call in calls]
            steps.append(expand(np.stack([f.step for f in known]), known[0].agents, agents))
        return np.concatenate(steps)

    def complete(self, validation: Sequence[Run]) -> None:
        for run in validation:
            tokens = run.output_tokens.tolist()
            for i, following in enumerate((*run.agents, None)):
                self.counts.observe(run.workflow, run.agents[:i], following, answers=tokens[:i])


@dataclass
class Net:
    """`stage`: how far the last call has come: forecasts at its start, after its prefill, or at its end."""

    model: Model
    stage: Stage = "finished"

    def probability(self, runs: Sequence[Run], agents: Sequence[str]) -> Array:
        inputs = inputs_of(runs, self.model.agents, tuple(self.model.net.options.signals))
        if self.stage != "finished":
            inputs = begun(inputs) if self.stage == "begun" else prefilled(inputs)
        return expand(self.model.probability(inputs), self.model.agents, agents)

    def complete(self, validation: Sequence[Run]) -> None: ...


def mixtures(model: Model, train: Sequence[Run], validation: Sequence[Run]) -> dict[str, Any]:
    """For config.json: [K] weight of the net in service, against counts that have seen the same runs; `mixture` at the
    start of a call, `mixture_later` at its later stages."""
    counts = Counts(train, CountsOptions(horizon=model.net.options.horizon))
    label = labels_of(validation, model.agents, model.net.options.horizon)

    def weight(stage: Stage) -> list[float]:
        counts.answered = stage == "finished"
        counted = counts.probability(validation, model.agents)
        own = scale(Net(model, stage).probability(validation, model.agents), model.temperature)
        return [float(share) for share in fit_mixture(counted, own, label)]

    later: tuple[Stage, ...] = ("prefilled", "finished")
    return {"mixture": weight("begun"), "mixture_later": {stage: weight(stage) for stage in later}}


def candidates(runs: Sequence[Run], horizon: int, train: TrainOptions) -> dict[str, Fit]:
    """Name -> fit. Models that read text are there when every run has hidden states."""

    def counts(order: int, visits: int, answered: bool = False) -> Fit:
        options = CountsOptions(order=order, visits=visits, horizon=horizon)
        return lambda runs, _: Counts(runs, options, answered)

    def net(graph: bool, path_features: bool, *signals: str) -> Fit:
        widths = {name: runs[0].hidden[name].shape[1] for name in signals}
        options = NetOptions(1, horizon, graph=graph, path_features=path_features, signals=widths)
        return lambda runs, validation: Net(fit(runs, validation, options, train))

    models: dict[str, Fit] = {
        "majority": lambda runs, _: Majority(runs, horizon),
        "counts of order 1": counts(1, 0),
        "counts of order 2": counts(2, 0),
        "counts of order 3": counts(3, 0),
        "variable-order counts": counts(8, 4),
        "variable-order counts at the end of a call": counts(8, 4, answered=True),
        "mlp": net(False, True),
        "path only": net(True, False),
        "graphsage": net(True, True),
    }
    signals = [name for name in runs[0].hidden if all(name in run.hidden for run in runs)]
    for name in signals:
        models[f"text only ({name})"] = net(False, False, name)
        models[f"graphsage + {name}"] = net(True, True, name)
    if len(signals) > 1:
        models["graphsage + all signals"] = net(True, True, *signals)
    return models

"""Which predictor a replay forecasts with: what accuracy is worth in hits."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from pbkv_ray.core.forecast import Predictor
from pbkv_ray.errors import ConfigError
from pbkv_ray.predict.counts import CountsOptions, VariableOrderCounts
from pbkv_ray.replay.misled import Misled
from pbkv_ray.replay.workload import Workload

NAMES = ("counts", "order-1", "order-2", "order-3", "graphsage", "served", "misled")


def predictor_of(name: str, train: Workload | None) -> Callable[[], Predictor]:
    """Makes a fresh predictor for each policy. counts: variable order; order-N: the last N agents alone; graphsage:
    the net alone, trained on `train`; served: the net beside the counts and behind its gate, as in service; misled:
    sure and wrong. At the end of a call each is refined by the length of the answer, in proportion to what was counted.

    Raises ConfigError for an unknown name, and for a net without `train`.
    """
    if name == "counts":
        return VariableOrderCounts
    if name == "misled":
        return Misled
    if name in ("order-1", "order-2", "order-3"):
        options = CountsOptions(order=int(name[-1]), visits=0)
        return lambda: VariableOrderCounts(options)
    if name not in NAMES:
        raise ConfigError(f"predictor {name!r} is unknown; known are {', '.join(NAMES)}")
    if train is None:
        raise ConfigError(f"predictor {name!r} needs runs to be trained on; leave out --train none")
    return _net(train, alone=name == "graphsage")


def _net(train: Workload, alone: bool) -> Callable[[], Predictor]:
    from pbkv_ray.predict import dataset
    from pbkv_ray.predict.baselines import mixtures
    from pbkv_ray.predict.graphsage import NetOptions
    from pbkv_ray.predict.inference import ServedNet
    from pbkv_ray.predict.serving import Served, ServingOptions
    from pbkv_ray.predict.train import TrainOptions, fit, save

    runs = [
        dataset.Run(
            run.run_id,
            run.workflow,
            run.instance,
            run.agents,
            np.array([call.prompt_tokens for call in run.calls]),
            np.array([call.output_tokens for call in run.calls]),
        )
        for run in train.runs
    ]
    nets: dict[str, ServedNet] = {}
    for workflow in sorted({run.workflow for run in runs}):
        own = [run for run in runs if run.workflow == workflow]
        part = dataset.folds(own, 5)
        held = [run for run, fold in zip(own, part, strict=True) if fold == 0]
        rest = [run for run, fold in zip(own, part, strict=True) if fold != 0]
        model = fit(rest, held, NetOptions(1), TrainOptions())
        weights = {"mixture": [1.0] * model.net.options.horizon} if alone else mixtures(model, rest, held)
        with TemporaryDirectory(prefix="pbkv-net-") as folder:
            save(model, Path(folder), {"workflow": workflow, **weights})
            nets[workflow] = ServedNet.load(Path(folder))

    def make() -> Predictor:
        options = ServingOptions(slow_s=1e9)  # a busy machine must not change what is simulated
        served = Served(options=replace(options, margin=1e9) if alone else options)
        for workflow, net in nets.items():
            served.install(workflow, net)
            served.gates()[workflow].open = alone
        return served

    return make

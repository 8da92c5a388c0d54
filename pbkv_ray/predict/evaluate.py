"""Compare predictors on a trace: k-fold, split by task instance, every position of every run once."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pbkv_ray.core.forecast import Array
from pbkv_ray.errors import InputError
from pbkv_ray.predict import metrics
from pbkv_ray.predict.baselines import Fit, Fitted, Net, candidates
from pbkv_ray.predict.calibration import fit_mixture, fit_temperature, mix, scale
from pbkv_ray.predict.dataset import Ints, Run, Trace, folds, labels, vocabulary
from pbkv_ray.predict.train import TrainOptions

HORIZON = 10
COUNTS, NET = "variable-order counts", "graphsage"
COUNTS_AT_END = "variable-order counts at the end of a call"  # the length of its answer is known
AT_START = "graphsage at the start of a call"  # the same net, without what only the finished call tells
SERVED, SERVED_AT_START = "served (counts and graphsage)", "served at the start of a call"
_DERIVED = {AT_START: NET, SERVED: NET, SERVED_AT_START: NET}


@dataclass(slots=True)
class _Answers:
    """What one model said about the test positions, fold after fold: before and after temperature scaling."""

    plain: list[Array] = field(default_factory=list)
    scaled: list[Array] = field(default_factory=list)
    temperature: list[Array] = field(default_factory=list)

    def add(self, plain: Array, temperature: Array) -> None:
        self.plain.append(plain)
        self.scaled.append(scale(plain, temperature))
        self.temperature.append(temperature)


def evaluate(
    trace: Trace,
    count: int = 5,
    names: Sequence[str] = (),
    train: TrainOptions | None = None,
    seed: int = 0,
    progress: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """The figures of every model (or of `names`), pooled over the trace and per workflow.

    In each fold one part tests, the next one validates (early stopping, temperatures, the mixture's weights), the
    rest trains; counts learn the validation runs too before they are tested. InputError for an unknown model name.
    """
    agents = vocabulary(trace.runs)
    answers: dict[str, dict[str, _Answers]] = {}
    truth: dict[str, list[Ints]] = {}
    for workflow in trace.workflows:
        runs = [run for run in trace.runs if run.workflow == workflow]
        known = candidates(runs, HORIZON, train or TrainOptions(seed=seed))
        if unknown := [name for name in names if name not in (*known, *_DERIVED)]:
            raise InputError(f"model {unknown[0]!r} is unknown; this trace allows {', '.join([*known, *_DERIVED])}")
        mine = answers[workflow] = {}
        fold = folds(runs, count, seed)
        for test in range(count):
            parts = [[run for run, f in zip(runs, fold, strict=True) if f == part] for part in range(count)]
            validation = (test + 1) % count
            rest = [run for part, of in enumerate(parts) for run in of if part not in (test, validation)]
            if count == 2:
                rest, parts[validation] = _halves(parts[validation])
            truth.setdefault(workflow, []).append(_labels(parts[test], agents))
            _fold(known, names, (rest, parts[validation], parts[test]), agents, mine, progress)
    return {
        "trace": trace.name,
        "data_sha256": trace.sha256,
        "folds": count,
        "seed": seed,
        "runs": len(trace.runs),
        "models": _figures({name: [answers[w][name] for w in answers] for name in answers[trace.workflows[0]]},
                           [labels for w in answers for labels in truth[w]]),
        "workflows": {
            w: {"models": _figures({name: [a] for name, a in answers[w].items()}, truth[w])} for w in answers
        },
    }  # fmt: skip


def _halves(runs: Sequence[Run]) -> tuple[list[Run], list[Run]]:
    half = folds(runs, 2, seed=1)
    return [r for r, f in zip(runs, half, strict=True) if f], [r for r, f in zip(runs, half, strict=True) if not f]


def _labels(runs: Sequence[Run], agents: Sequence[str]) -> Ints:
    return np.concatenate([labels(run, agents, HORIZON) for run in runs])


def _fold(
    known: dict[str, Fit],
    names: Sequence[str],
    parts: tuple[Sequence[Run], Sequence[Run], Sequence[Run]],
    agents: Sequence[str],
    answers: dict[str, _Answers],
    progress: Callable[[str], None] | None,
) -> None:
    train, validation, test = parts
    held = _labels(validation, agents)
    base = (COUNTS, COUNTS_AT_END, NET)
    needed = {*names, *(base if any(name in _DERIVED for name in names) else ())} if names else {*known}
    kept: dict[str, tuple[Array, Array]] = {}  # (validation, test) as they serve: counts as they are, nets calibrated

    def answer(name: str, before: Array, plain: Array) -> None:
        temperature = fit_temperature(before, held)
        counted = name in (COUNTS, COUNTS_AT_END)
        kept[name] = (before, plain) if counted else (scale(before, temperature), scale(plain, temperature))
        if not names or name in names:
            answers.setdefault(name, _Answers()).add(plain, temperature)

    for name, fit in known.items():
        if name not in needed:
            continue
        model: Fitted = fit(train, validation)
        before = model.probability(validation, agents)
        model.complete(validation)
        answer(name, before, model.probability(test, agents))
        if name == NET and isinstance(model, Net):
            begun = Net(model.model, "begun")
            answer(AT_START, begun.probability(validation, agents), begun.probability(test, agents))
        if progress:
            progress(name)
    if all(name in kept for name in base):
        for name, counts, net in ((SERVED, COUNTS_AT_END, NET), (SERVED_AT_START, COUNTS, AT_START)):
            weight = fit_mixture(kept[counts][0], kept[net][0], held)
            answer(name, *(mix(kept[counts][part], kept[net][part], weight) for part in (0, 1)))


def _figures(answers: dict[str, list[_Answers]], truth: Sequence[Ints]) -> dict[str, dict[str, Any]]:
    label = np.concatenate(truth)
    known = [np.flatnonzero(label[:, k] >= 0) for k in range(HORIZON)]
    figures = {}
    for name, parts in answers.items():
        plain = np.concatenate([p for part in parts for p in part.plain])
        scaled = np.concatenate([p for part in parts for p in part.scaled])
        end = plain.shape[2] - 1

        def each(of: Callable[[Array, Ints], float], probability: Array) -> list[float | None]:
            values = [of(probability[rows, k], label[rows, k]) if len(rows) else math.nan
                      for k, rows in enumerate(known)]  # fmt: skip
            return [None if math.isnan(value) else round(value, 5) for value in values]

        ending = metrics.recall(plain[known[0], 0], label[known[0], 0], end)
        figures[name] = {
            "top1": each(metrics.top1, plain),
            "nll": each(metrics.log_loss, plain),
            "ece": each(metrics.calibration_error, plain),
            "end_recall": None if math.isnan(ending) else round(ending, 5),
            "ece_debiased": each(metrics.debiased_calibration_error, plain),
            "nll_scaled": each(metrics.log_loss, scaled),
            "ece_scaled": each(metrics.calibration_error, scaled),
            "ece_scaled_debiased": each(metrics.debiased_calibration_error, scaled),
            "temperature": np.mean([t for part in parts for t in part.temperature], 0).round(4).tolist(),
            "samples": [len(rows) for rows in known],
        }
    return figures

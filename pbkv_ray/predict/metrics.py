"""How good forecasts are. All take probability [n, classes] and label [n] of one step, without masked samples."""

import numpy as np
import numpy.typing as npt

from pbkv_ray.core.forecast import Array

Labels = npt.NDArray[np.int64]

_LEAST = 1e-9


def top1(probability: Array, label: Labels) -> float:
    """Share of samples whose likeliest class is the true one."""
    return float((probability.argmax(1) == label).mean())


def log_loss(probability: Array, label: Labels) -> float:
    """Mean negative log likelihood, in nats."""
    return float(-np.log(np.maximum(probability[np.arange(len(label)), label], _LEAST)).mean())


def recall(probability: Array, label: Labels, of: int) -> float:
    """Share of the samples of class `of` whose likeliest class it is; nan when there are none."""
    mine = label == of
    return float((probability[mine].argmax(1) == of).mean()) if mine.any() else float("nan")


def calibration_error(probability: Array, label: Labels, bins: int = 15) -> float:
    """Expected calibration error of the top class: mean |accuracy - confidence| over bins of equal numbers."""
    confidence = probability.max(1)
    return _gap(confidence, (probability.argmax(1) == label)[None], bins)[0]


def debiased_calibration_error(
    probability: Array, label: Labels, bins: int = 15, draws: int = 50, seed: int = 0
) -> float:
    """Calibration error less what a perfectly calibrated model of the same confidences shows on so few samples
    (the mean over `draws` of answers drawn from its own confidences), not below zero."""
    confidence = probability.max(1)
    drawn = np.random.default_rng(seed).random((draws, len(confidence))) < confidence
    plain = _gap(confidence, (probability.argmax(1) == label)[None], bins)[0]
    return max(0.0, plain - float(np.mean(_gap(confidence, drawn, bins))))


def _gap(confidence: Array, right: npt.NDArray[np.bool_], bins: int) -> list[float]:
    """[draws] for `right` [draws, n]."""
    order = np.argsort(confidence, kind="stable")
    edges = np.linspace(0, len(order), min(bins, len(order)) + 1).astype(int)
    difference = right[:, order] - confidence[order]
    sums = np.add.reduceat(difference, edges[:-1], axis=1)
    return [float(gap) for gap in np.abs(sums).sum(1) / len(order)]

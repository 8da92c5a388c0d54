"""Metrics on answers whose score can be worked out by hand."""

import math

import numpy as np
import pytest

from pbkv_ray.predict import metrics

P = np.array([[0.7, 0.2, 0.1], [0.6, 0.3, 0.1], [0.1, 0.1, 0.8], [0.2, 0.5, 0.3]])
LABEL = np.array([0, 1, 2, 2])


def test_top1_counts_the_likeliest() -> None:
    assert metrics.top1(P, LABEL) == 0.5


def test_log_loss_is_the_mean_surprise() -> None:
    assert metrics.log_loss(P, LABEL) == pytest.approx(-np.log([0.7, 0.3, 0.8, 0.3]).mean())
    assert math.isfinite(metrics.log_loss(np.array([[1.0, 0.0]]), np.array([1])))


def test_recall_is_of_one_class() -> None:
    assert metrics.recall(P, LABEL, 2) == 0.5
    assert math.isnan(metrics.recall(P[:1], LABEL[:1], 2))


def test_calibration_error_is_the_gap_between_sure_and_right() -> None:
    sure = np.tile([0.9, 0.1], (10, 1))
    assert metrics.calibration_error(sure, np.array([0] * 9 + [1]), bins=1) == pytest.approx(0.0)
    assert metrics.calibration_error(sure, np.array([0] * 5 + [1] * 5), bins=1) == pytest.approx(0.4)
    two = np.concatenate((np.tile([0.6, 0.4], (10, 1)), sure))
    label = np.array([0] * 8 + [1] * 2 + [0] * 7 + [1] * 3)  # .2 too shy, .2 too sure: they must not cancel
    assert metrics.calibration_error(two, label, bins=2) == pytest.approx(0.2)


def test_a_perfect_model_of_few_samples_is_not_blamed() -> None:
    generator = np.random.default_rng(1)
    confidence = generator.uniform(0.5, 1.0, 300)
    p = np.stack((confidence, 1 - confidence), 1)
    label = (generator.random(300) > confidence).astype(np.int64)
    assert metrics.calibration_error(p, label) > 0.03
    assert metrics.debiased_calibration_error(p, label) < 0.015
    wrong = (generator.random(300) > confidence - 0.3).astype(np.int64)
    assert metrics.debiased_calibration_error(p, wrong) > 0.2

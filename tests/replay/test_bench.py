"""The arithmetic of `pbkv bench policies`; the bench itself runs on a real engine (`make soak`)."""

import pytest

from pbkv_ray.replay.tallies import paired_ratio


def test_the_ratio_of_paired_blocks_forgets_what_slows_both():
    """Ours costs 10 % more in every block, however slow the machine was meanwhile."""
    theirs = [1.0, 3.0, 2.0, 10.0]
    ratio = paired_ratio([1.1 * x for x in theirs], theirs)
    assert ratio == {"mean": 1.1, "low": 1.1, "high": 1.1}


def test_the_interval_holds_the_mean_and_grows_with_the_noise():
    calm, wild = (paired_ratio([1 - x, 1.0, 1 + x], [1.0] * 3) for x in (0.01, 0.1))
    assert calm["low"] < calm["mean"] < calm["high"]
    assert calm["mean"] == pytest.approx(1.0, abs=1e-3)
    assert wild["high"] - wild["low"] > 5 * (calm["high"] - calm["low"])


def test_two_blocks_or_no_figures_have_no_interval():
    assert paired_ratio([1.0, 1.0], [1.0, 1.0]) is None
    assert paired_ratio([1.0, 0.0, 1.0], [1.0] * 3) is None

"""Waiting times: the silence of a run says when, and whether, it calls again."""

import numpy as np
import pytest

from pbkv_ray.core.waits import ELAPSED_S, WaitingTimes, at_elapsed


def remaining(waits: WaitingTimes, agent: str, *elapsed_s: float) -> list[float]:
    curve, _ = waits.curve("flow", agent)
    return (1 / at_elapsed(np.tile(curve, (len(elapsed_s), 1)), np.array(elapsed_s))).tolist()


def test_a_regular_wait_runs_down() -> None:
    waits = WaitingTimes()
    for _ in range(200):
        waits.observe("flow", "coder", 20.0)
    left = remaining(waits, "coder", 0.0, 5.0, 10.0)
    assert left == [pytest.approx(s, rel=0.35) for s in (20.0, 15.0, 10.0)]


def test_an_overdue_run_is_expected_later_the_longer_it_is_silent() -> None:
    waits = WaitingTimes()
    for _ in range(200):
        waits.observe("flow", "coder", 20.0)
    left = remaining(waits, "coder", 60.0, 600.0, 6_000.0, 60_000.0)
    assert left == sorted(left)
    assert left[1] > 100  # as long again, within a factor of a few, not "any moment now"


def test_two_kinds_of_wait_in_one_agent_are_told_apart_by_the_silence() -> None:
    """A tool answers in a second or so, a person in an hour: after ten seconds it is the person."""
    waits = WaitingTimes()
    for i in range(200):
        waits.observe("flow", "asker", 3_600.0 if i % 2 else 1.0)
    assert remaining(waits, "asker", 10.0)[0] > 1_000


def test_one_wait_in_twenty_that_lasts_an_hour_does_not_hide_the_others() -> None:
    waits = WaitingTimes()
    for i in range(200):
        waits.observe("flow", "asker", 3_600.0 if i % 20 == 0 else 1.0)
    _, mean_s = waits.curve("flow", "asker")
    at_once, later = remaining(waits, "asker", 0.0, 30.0)
    assert mean_s > 60
    assert at_once < 0.25 * mean_s
    assert later > 5 * at_once


def test_a_long_answer_says_nothing_of_the_tool_that_follows() -> None:
    waits = WaitingTimes()
    for i in range(200):
        answer_s = 90.0 if i % 2 else 1.0
        waits.observe("flow", "coder", answer_s + 5.0, answer_s)
    idle, idle_s = waits.curve("flow", "coder", "idle")
    _, answer_s = waits.curve("flow", "coder", "answer")
    _, whole_s = waits.curve("flow", "coder")
    assert (1 / at_elapsed(idle[None], np.array([0.0]))).tolist() == [pytest.approx(5.0, rel=0.35)]
    assert (idle_s, answer_s, whole_s) == tuple(pytest.approx(s, rel=0.1) for s in (5.0, 45.5, 50.5))


def test_an_agent_seen_seldom_leans_on_its_workflow() -> None:
    waits = WaitingTimes()
    for _ in range(100):
        waits.observe("flow", "coder", 100.0)
    _, new = waits.curve("flow", "never seen")
    _, other = waits.curve("other flow", "never seen")
    assert 60 < new < 200
    assert 60 < other < 250  # everything seen so far is better than nothing


def test_the_grid_is_met_and_what_lies_between_is_between() -> None:
    curve = np.arange(len(ELAPSED_S), dtype=float)[None]
    assert at_elapsed(curve, ELAPSED_S[[7]]).tolist() == [pytest.approx(7.0)]
    assert 7 < at_elapsed(curve, ELAPSED_S[[7]] * 1.05)[0] < 8
    assert at_elapsed(curve, np.array([1e9]))[0] == pytest.approx(len(ELAPSED_S) - 1, abs=0.01)


def test_agents_are_bounded_and_odd_waits_are_harmless() -> None:
    waits = WaitingTimes(max_keys=10)
    for i in range(100):
        waits.observe("flow", f"agent {i}", -1.0 if i % 2 else 1e12)
        curve, mean_s = waits.curve("flow", f"agent {i}")
        assert np.isfinite(curve).all()
        assert (curve > 0).all()
        assert mean_s > 0
    assert waits.forgotten == 92

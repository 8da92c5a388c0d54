"""How long an answer was says who is called next: a verifier that agrees is long, and ends the run."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pbkv_ray.core.forecast import Forecast
from pbkv_ray.predict.answers import LENGTHS, AnswerLengths, length_class

AGENTS = ("selector", "verifier")
EVEN = Forecast(AGENTS, np.array([[0.5, 0.0, 0.5], [0.3, 0.3, 0.4]]), np.array([1.0, 2.0]))


def taught(**bounds: int) -> AnswerLengths:
    """Thirty short verdicts sent the run back to the selector, who then called the verifier; thirty long ones ended
    it."""
    lengths = AnswerLengths(**bounds)
    for _ in range(30):
        lengths.observe("math", ["verifier"], [10], "selector")
        lengths.observe("math", ["verifier", "selector"], [10, 3], "verifier")
        lengths.observe("math", ["verifier"], [400], None)
    return lengths


def test_a_short_verdict_sends_the_run_back_and_a_long_one_ends_it() -> None:
    lengths = taught()
    short, long = (lengths.refined("math", "verifier", tokens, EVEN) for tokens in (10, 400))
    # P(this length | agent) is (30 + 1/12) / 61; of the thirty that went on, all were short; ten say nothing.
    likelier, rarer = (30 / ((30 + 1 / 12) / 61) + 10) / 40, 10 / 40
    on, ends = 0.5 * likelier / (0.5 * likelier + 0.5 * rarer), 0.5 * rarer / (0.5 * likelier + 0.5 * rarer)
    assert short.step[0].tolist() == pytest.approx([on, 0.0, ends], abs=1e-6)
    assert long.step[0].tolist() == pytest.approx([ends, 0.0, on], abs=1e-6)
    assert short.wait_s is EVEN.wait_s
    assert EVEN.step[0].tolist() == [0.5, 0.0, 0.5], "the forecast of the call's start stays as it was"


def test_later_steps_are_learned_for_themselves() -> None:
    after = taught().refined("math", "verifier", 10, EVEN).step[1]
    assert after[1] > EVEN.step[1][1]  # a short verdict came two calls before the next one
    assert after.sum() == pytest.approx(1.0)


def test_what_was_never_seen_changes_nothing() -> None:
    lengths = taught()
    assert lengths.refined("other", "verifier", 10, EVEN) is EVEN
    assert lengths.refined("math", "coder", 10, EVEN) is EVEN
    unknown = Forecast(("x", "y"), np.array([[0.6, 0.4, 0.0]]))
    assert lengths.refined("math", "verifier", 10, unknown).step.tolist() == pytest.approx(unknown.step)


def test_a_call_whose_length_is_not_known_teaches_nothing() -> None:
    lengths = AnswerLengths()
    lengths.observe("math", ["a", "b"], [None, None], "a")
    lengths.observe("math", ["a", "b"], [], "a")
    assert lengths.refined("math", "b", 10, EVEN) is EVEN


def test_agents_and_workflows_beyond_the_bounds_are_not_told_apart() -> None:
    lengths = taught(max_agents=2, max_workflows=2)
    lengths.observe("math", ["third"], [10], "selector")
    assert lengths.refined("math", "third", 10, EVEN) is EVEN
    for workflow in ("b", "math", "c"):
        lengths.observe(workflow, ["verifier"], [10], "selector")
    assert lengths.refined("b", "verifier", 10, EVEN) is EVEN
    assert lengths.refined("math", "verifier", 10, EVEN) is not EVEN


def test_old_answers_fade() -> None:
    """After many runs that end whatever the length, one that went on weighs as much as hundreds did long ago."""
    lengths = AnswerLengths()
    for _ in range(15_000):
        lengths.observe("math", ["verifier"], [10], "selector")
    for _ in range(60_000):
        lengths.observe("math", ["verifier"], [400], "selector")
    faded = lengths.refined("math", "verifier", 10, EVEN).step[0]
    assert faded[0] < 0.55  # as likely as long answers would have it: 15,000 of 75,000 would say nothing either
    counted = lengths._workflows["math"].counts
    assert counted.sum() < 25_000


def test_more_agents_keep_what_was_learned_of_the_first_ones() -> None:
    lengths = taught()
    before = lengths.refined("math", "verifier", 10, EVEN).step
    for i in range(20):
        lengths.observe("math", [f"agent{i}"], [i], "selector")
    after = lengths.refined("math", "verifier", 10, EVEN).step
    assert after[0] == pytest.approx(before[0])
    wide = Forecast(("agent19", *AGENTS), np.array([[0.25, 0.25, 0.0, 0.5]]))
    lengths.observe("math", ["verifier"], [10], "agent19")
    assert lengths.refined("math", "verifier", 10, wide).step.shape == (1, 4)


def test_what_was_learned_lately_shows_soon() -> None:
    lengths = taught()
    before = lengths.refined("math", "verifier", 10, EVEN).step[0, 2]
    for _ in range(10):
        lengths.observe("math", ["verifier"], [10], None)
    assert lengths.refined("math", "verifier", 10, EVEN).step[0, 2] > before + 0.05


def test_lengths_are_told_apart_by_their_ratio() -> None:
    assert [length_class(n) for n in (0, 1, 2, 10, 11, 100, 1_000, 10**9)] == [0, 1, 1, 3, 3, 6, 10, LENGTHS - 1]


@given(
    st.lists(
        st.tuples(st.lists(st.sampled_from("abc"), min_size=1, max_size=4), st.integers(0, 5_000), st.booleans()),
        max_size=30,
    ),
    st.lists(st.floats(0.01, 1.0), min_size=4, max_size=4),
    st.integers(0, 5_000),
)
def test_a_refined_forecast_is_a_forecast(
    calls: list[tuple[list[str], int, bool]], weights: list[float], tokens: int
) -> None:
    """Rows sum to one, nothing is sure that was open, and what was impossible stays so."""
    lengths = AnswerLengths(horizon=2)
    for path, answer, ends in calls:
        lengths.observe("w", path[:-1], [answer] * (len(path) - 1), path[-1])
        lengths.observe("w", path, [answer] * len(path), None if ends else "a")
    row = np.array(weights) / sum(weights)
    forecast = Forecast(("a", "b", "c"), np.array([row, [0.0, 0.5, 0.5, 0.0], row]))
    step = lengths.refined("w", "a", tokens, forecast).step
    assert step.sum(1) == pytest.approx(np.ones(3))
    assert (step[0] > 0).all()
    assert step[1, [0, 3]].tolist() == [0.0, 0.0]
    assert step[2] == pytest.approx(row)  # beyond the horizon of what is learned

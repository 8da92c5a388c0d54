"""Scores as arithmetic: the paper's figures by hand, first passage over time, and what every score must keep."""

from dataclasses import replace

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from pbkv_ray.core.forecast import Array, Forecast
from pbkv_ray.core.rates import BACK, DEPTHS, KINDS, OLDER, SHARED, STALE, STAY, Rates, certain
from pbkv_ray.core.scores import (
    Clock,
    Outlook,
    PaperScore,
    RecencyScore,
    Score,
    StepsScore,
    TimeScore,
    Uses,
    score_of,
)
from pbkv_ray.core.waits import WaitingTimes
from pbkv_ray.errors import ConfigError

PLAN, CODE, TEST = range(3)


def outlook(rows: list[list[float]], current: int | None = None, rates: Rates | None = None) -> Outlook:
    """Rows are P(plan), P(code), P(test), P(END) for call 1, 2, ..."""
    step = np.array(rows, float)
    return Outlook(step[:, :-1], step[:, -1], current, rates or certain(step.shape[1] - 1))


def uses(*agents: tuple[int, ...], shared: bool = False, depth: int = 0) -> Uses:
    """One use a tuple: the agents that have read the node, all of them in their latest prompt."""
    ever = np.zeros((len(agents), 3), bool)
    for row, readers in enumerate(agents):
        ever[row, list(readers)] = True
    return Uses(ever, ever, np.zeros_like(ever), np.full(len(agents), shared), np.full(len(agents), depth))


def clock(elapsed_s: float, mean_s: float = 10.0, horizon: int = 10, calls: int = 50) -> Clock:
    """A run that called at 0; its waits were about `mean_s`, within a factor of about two."""
    waits = WaitingTimes()
    rng = np.random.default_rng(0)
    for seconds in rng.lognormal(np.log(mean_s), 0.5, calls):
        waits.observe("flow", "plan", float(seconds))
    curve, mean = waits.curve("flow", "plan")
    start = mean * np.arange(1, horizon + 1)
    zero = np.zeros(1)
    return Clock(zero, zero, curve[None], zero, np.array([mean]), start[None])


def score(policy: Score, run: Outlook, nodes: Uses, elapsed_s: float = 0.0) -> list[float]:
    discounts = policy.discounts(elapsed_s, clock(elapsed_s, horizon=policy.horizon))
    return [round(float(x), 6) for x in (policy.weights(run, nodes) * discounts).sum(1)]


def test_paper_equation_2_by_hand() -> None:
    """Call 1: code .8, test .1, END .1. Call 2: plan .5, END .5. Call 3: code surely. s = 1, .9, .45."""
    run = outlook([[0, 0.8, 0.1, 0.1], [0.5, 0, 0, 0.5], [0, 1, 0, 0]])
    assert score(PaperScore(), run, uses((CODE,), (TEST,), (PLAN,), (PLAN, CODE), ())) == [
        pytest.approx(0.8 + 0.49 * 0.45),
        pytest.approx(0.1),
        pytest.approx(0.7 * 0.9 * 0.5),
        pytest.approx(0.8 + 0.49 * 0.45 + 0.7 * 0.9 * 0.5),
        0.0,
    ]


def test_paper_score_is_the_forecasts_own_value() -> None:
    """`Forecast.values` and the score are the same equation, written twice."""
    rng = np.random.default_rng(3)
    step = rng.dirichlet(np.ones(4), 3)
    forecast = Forecast(("plan", "code", "test"), step)
    run = Outlook(step[:, :-1], step[:, -1], None, certain(3))
    assert score(PaperScore(), run, uses((PLAN,), (CODE,), (TEST,))) == pytest.approx(
        forecast.values(0.7, 3).tolist(), abs=1e-6
    )


def test_paper_score_of_a_certain_reader_is_at_most_2_19() -> None:
    """reference: 1 + .7 + .49 for one run."""
    assert score(PaperScore(), outlook([[0, 1, 0, 0]] * 5), uses((CODE,))) == [2.19]


def test_a_short_forecast_is_taken_to_end_there() -> None:
    assert score(PaperScore(), outlook([[0, 1, 0, 0]]), uses((CODE,))) == [1.0]


def test_lemma_g1_the_score_is_the_expected_discounted_misses() -> None:
    """Monte Carlo of paper Lemma G.1: evict c, walk the run for K calls, count gamma^(k-1) per call that hits c."""
    rng = np.random.default_rng(7)
    step = rng.dirichlet(np.ones(4), 3)
    readers = (PLAN, TEST)
    calls = np.array([rng.choice(4, 20_000, p=row) for row in step])  # [K, walks]; 3 is END
    alive = np.cumprod(np.vstack((np.ones(20_000), calls[:-1] != 3)), axis=0)
    misses = (0.7 ** np.arange(3)[:, None] * alive * np.isin(calls, readers)).sum(0)
    expected = score(PaperScore(), outlook(step.tolist()), uses(readers))[0]
    assert misses.mean() == pytest.approx(expected, abs=4 * misses.std() / np.sqrt(20_000))


def test_time_counts_the_first_use_only() -> None:
    """Nobody pays twice for one miss: after the first call has brought the node back, the second finds it."""
    policy = TimeScore(learns=False)
    always = policy.weights(outlook([[0, 1, 0, 0]] * 4), uses((CODE,)))[0]
    assert always.tolist() == [1.0] + [0.0] * 9
    half = policy.weights(outlook([[0.25, 0.5, 0, 0.25]] * 3), uses((CODE,)))[0]
    assert half.tolist() == pytest.approx([0.5, 0.5 * 0.25, 0.5 * 0.25**2] + [0.0] * 7)


def test_time_prefers_the_sooner_use() -> None:
    soon = outlook([[0, 1, 0, 0], [1, 0, 0, 0]])
    assert score(TimeScore(), soon, uses((CODE,)))[0] > score(TimeScore(), soon, uses((PLAN,)))[0]


def test_a_run_rises_until_it_is_due_and_falls_when_it_is_overdue() -> None:
    run, nodes = outlook([[0, 1, 0, 0]]), uses((CODE,))
    worth = [score(TimeScore(), run, nodes, s)[0] for s in (0.0, 5.0, 10.0, 60.0, 600.0, 6_000.0)]
    assert worth[0] < worth[1] < worth[2]
    assert worth[3] > worth[4] > worth[5]
    assert worth[5] < 0.1 * worth[0]  # a person who answers tomorrow


def test_a_forecast_that_knows_the_wait_shifts_the_usual_one() -> None:
    usual = clock(0.0)
    late = replace(usual, start_s=usual.start_s * 3)
    policy = TimeScore()
    assert policy.discounts(0.0, late)[0, 0] == pytest.approx(policy.discounts(0.0, usual)[0, 0] / 3, rel=1e-6)


def test_a_punctual_forecast_is_taken_at_its_word() -> None:
    known = replace(clock(0.0), start_s=np.array([[4.0, 9.0]]))
    assert TimeScore(horizon=2, punctual=True).discounts(2.0, known).tolist() == [[0.5, 1 / 7]]


def test_learned_reuse_tells_a_return_from_a_visit_that_goes_on() -> None:
    rates = certain(3)
    rates.kind[[BACK, OLDER, STALE]] = 0.0  # after others have called, nothing private is used again
    going_on, coming_back = (replace(rates, next=rates.kind[[kind, OLDER]]) for kind in (STAY, BACK))
    run = [[0.5, 0.5, 0, 0], [0, 1, 0, 0]]
    private = uses((CODE,))
    weights = {
        current: TimeScore().weights(outlook(run, current, given), private)[0, :2].tolist()
        for current, given in ((CODE, going_on), (PLAN, coming_back))
    }
    # The coder goes on at once (.5) or comes back at call 2: only going on, twice in a row, uses its context.
    assert weights == {CODE: [0.5, pytest.approx(0.5 * 0.5)], PLAN: [0.0, 0.0]}
    shared = TimeScore().weights(outlook(run, PLAN, coming_back), uses((CODE,), shared=True))[0, :2]
    assert shared.tolist() == [0.5, 0.5]


def test_a_context_that_the_agent_comes_back_to_is_worth_its_return() -> None:
    rates = certain(3)
    rates.kind[[STAY, BACK, STALE]] = 0.0
    rates.kind[OLDER] = 0.8  # two contexts in turn: the one before is next
    rates = replace(rates, next=rates.kind[[BACK, OLDER]])
    code, none = uses((CODE,)), np.zeros((1, 3), bool)
    nodes = {"latest": code, "older": replace(code, fresh=none, older=code.ever), "stale": replace(code, fresh=none)}
    run = outlook([[0, 1, 0, 0]], PLAN, rates)
    worth = {name: TimeScore().weights(run, known)[0, 0] for name, known in nodes.items()}
    assert worth == {"latest": 0.0, "older": 0.8, "stale": 0.0}


def test_handing_over_credits_the_next_agent() -> None:
    rates = certain(3)
    rates.cross[0, PLAN, CODE] = 0.9  # what the planner's prompt holds, the coder's contains
    rates = replace(rates, handed=0.5 * rates.cross[0])  # less often when it is the very next call
    run = outlook([[0, 1, 0, 0], [0, 1, 0, 0]], PLAN, rates)
    nodes = uses((PLAN,), (TEST,))
    assert TimeScore().weights(run, nodes)[:, :2].tolist() == [[0.45, pytest.approx(0.55 * 0.9)], [0.0, 0.0]]
    left = replace(nodes, fresh=np.zeros_like(nodes.fresh))
    assert TimeScore().weights(run, left)[:, :2].tolist() == [[0.0, 0.0], [0.0, 0.0]]  # in no latest prompt: not handed


def test_kvflow_takes_the_earliest_step_of_fixed_prompts_only() -> None:
    run = outlook([[0, 0.9, 0.01, 0.09], [0.5, 0.5, 0, 0]])
    policy = StepsScore()
    assert score(policy, run, uses((PLAN,), (CODE,), (TEST,), (PLAN, CODE), shared=True)) == [0.5, 1, 0, 1]
    assert score(policy, run, uses((CODE,))) == [0.0]
    assert (policy.combine, policy.retired_first) == ("max", False)


@pytest.mark.parametrize(
    ("policy", "name", "retired_first"),
    [
        ("lru", "lru", False),
        ("session", "lru", False),
        ("lae", "lae", True),
        ("kvflow", "kvflow", False),
        ("he", "paper", True),
        ("pbkv", "paper", True),
        ("pbkv+", "time", True),
        ("oracle", "time", True),
    ],
)
def test_every_policy_has_a_score(policy: str, name: str, retired_first: bool) -> None:
    made = score_of(policy)
    assert (made.name, made.retired_first) == (name, retired_first)


def test_wrong_settings_are_refused() -> None:
    with pytest.raises(ConfigError, match="policy 'mru' has no score"):
        score_of("mru")
    with pytest.raises(ConfigError, match=r"gamma 1\.5"):
        PaperScore(gamma=1.5)
    with pytest.raises(ConfigError, match="horizon 0"):
        TimeScore(horizon=0)


# What every score must keep: a child is never worth more than its parent.

probabilities = st.lists(st.integers(0, 9), min_size=4, max_size=4).filter(any)


@st.composite
def learned(draw: st.DrawFn) -> Rates:
    """Any rates that keep the promises of `ghost.Rates`: falling with depth, stale least, shared most."""
    size = KINDS * len(DEPTHS) * 3
    draws = np.array(draw(st.lists(st.floats(0, 1), min_size=size, max_size=size))).reshape(KINDS, len(DEPTHS), 3)
    kind = np.minimum.accumulate(draws, axis=1)
    kind = np.maximum(kind, kind[STALE])
    kind[SHARED] = kind.max(0)
    following = kind[[draw(st.sampled_from([STAY, BACK])), OLDER]]
    cross = np.array(draw(st.lists(st.floats(0, 1), min_size=18, max_size=18))).reshape(2, 3, 3)
    cross[1] = cross.max(0)
    handed = np.array(draw(st.lists(st.floats(0, 1), min_size=9, max_size=9))).reshape(3, 3)
    return Rates(kind, cross, following, handed)


@st.composite
def child_and_parent(draw: st.DrawFn) -> Uses:
    """Row 0 is contained in row 1."""
    bits = st.lists(st.booleans(), min_size=3, max_size=3).map(np.array)
    child_ever, parent_ever = draw(bits), draw(bits)
    parent_ever = parent_ever | child_ever
    parent_fresh = draw(bits) & parent_ever
    child_fresh = draw(bits) & child_ever & parent_fresh
    parent_older = draw(bits) & parent_ever
    child_older = draw(bits) & child_ever & parent_older
    child_shared = draw(st.booleans())
    depth = sorted((draw(st.integers(0, 3)), draw(st.integers(0, 3))), reverse=True)
    return Uses(
        np.array([child_ever, parent_ever]),
        np.array([child_fresh, parent_fresh]),
        np.array([child_older, parent_older]),
        np.array([child_shared, child_shared or draw(st.booleans())]),
        np.array(depth),
    )


@settings(deadline=None, max_examples=150)
@given(
    rows=st.lists(probabilities, min_size=1, max_size=6),
    current=st.sampled_from([None, PLAN, CODE, TEST]),
    rates=learned(),
    nodes=child_and_parent(),
    policy=st.sampled_from([RecencyScore(), PaperScore(), TimeScore(), StepsScore()]),
    elapsed_s=st.floats(0, 1e6),
)
def test_a_child_is_never_worth_more_than_its_parent(
    rows: list[list[int]], current: int | None, rates: Rates, nodes: Uses, policy: Score, elapsed_s: float
) -> None:
    step = np.array(rows, float)
    step /= step.sum(1, keepdims=True)
    run = Outlook(step[:, :-1], step[:, -1], current, rates)
    child, parent = score(policy, run, nodes, elapsed_s)
    assert 0 <= child <= parent + 1e-9


@settings(deadline=None, max_examples=100)
@given(rows=st.lists(probabilities, min_size=1, max_size=6), rates=learned(), nodes=child_and_parent())
def test_first_passage_is_a_distribution(rows: list[list[int]], rates: Rates, nodes: Uses) -> None:
    step: Array = np.array(rows, float)
    step /= step.sum(1, keepdims=True)
    first = TimeScore().weights(Outlook(step[:, :-1], step[:, -1], CODE, rates), nodes)
    assert (first >= 0).all()
    assert (first.sum(1) <= 1 + 1e-9).all()

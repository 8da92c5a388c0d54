"""The compiled loops of counts and waits against the same said slowly: in dictionaries of tuples, in numpy."""

from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import groupby

import numba
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pbkv_ray.predict import kernels
from pbkv_ray.predict.compiled import compiled
from pbkv_ray.predict.counts import CountsOptions, VariableOrderCounts
from pbkv_ray.predict.waits import Waits

ORDER, VISITS, HORIZON = 3, 2, 4
HISTORIES = st.lists(st.text("abc", max_size=14), min_size=1, max_size=8)


def families(history: str, visits: int = VISITS) -> list[list[object]]:
    """The contexts of a history, by family, each from its shortest; ^ stands before the first agent."""
    begun = "^" + history
    suffixes: list[object] = [("suffix", begun[len(begun) - n :]) for n in range(min(ORDER, len(begun)) + 1)]
    if not visits:
        return [suffixes]
    stays = [(agent, len(list(calls))) for agent, calls in groupby(begun)]
    agent, calls = stays[-1] if history else ("^", 0)
    before = [earlier for earlier, _ in stays[-2::-1]][:visits]
    often = sum(other == agent for other, _ in stays) if history else 0
    visited: list[object] = [("visits", agent, calls, *before[:n]) for n in range(len(before) + 1)]
    return [
        suffixes,
        [*suffixes[:2], *visited],
        [*suffixes[:2], ("visited", agent, often), ("visited", agent, often, calls)],
    ]


class Slow:
    """The counts of one workflow without a graph; its agents are a, b, c."""

    def __init__(self, options: CountsOptions) -> None:
        self.options = options
        self.counts: dict[tuple[object, int], Counter[str]] = defaultdict(Counter)
        self.weight = np.full((HORIZON, 3), 1 / 3)
        self.slope = np.full((HORIZON, 3), 1e-2)
        self.turn = 0

    def observe(self, history: str, following: str) -> None:
        ends = [history[: len(history) - step] for step in range(min(HORIZON, len(history) + 1))]
        self.turn += 1
        step = self.turn % len(ends)
        logs = self.logs(ends[step], step)
        column = "abc.".index(following)
        gradient = logs[:, column] - logs @ mixed(self.weight[step], logs)
        self.slope[step] = 0.999 * self.slope[step] + gradient**2
        self.weight[step] += self.options.learning_rate * gradient / np.sqrt(self.slope[step])
        self.weight[step] = self.weight[step].clip(-0.5, 2.0)
        for step, end in enumerate(ends):
            for context in {context for family in families(end) for context in family}:
                self.counts[context, step][following] += 1

    def logs(self, history: str, step: int) -> np.ndarray:
        return np.log([list(self.backed_off(family, step)) for family in families(history)])

    def backed_off(self, family: list[object], step: int) -> Iterator[float]:
        for following in "abc.":
            likely = 1 / 4
            for length, context in enumerate(family):
                counts = self.counts.get((context, step), Counter())
                strength = self.options.strength[0 if length < 2 else 1]
                likely = (counts[following] + strength * likely) / (counts.total() + strength)
            yield max(likely, kernels.FLOOR)

    def forecast(self, history: str) -> np.ndarray:
        return np.array([mixed(self.weight[step], self.logs(history, step)) for step in range(HORIZON)])


def mixed(weight: np.ndarray, logs: np.ndarray) -> np.ndarray:
    likely = np.exp(weight @ logs)
    return likely / likely.sum()


def keys_of(history: str, visits: int = VISITS) -> list[list[int]]:
    columns = np.array(["abc".index(agent) + 1 for agent in history], np.int32)
    keys = np.ones((3 if visits else 1, max(ORDER + 1, visits + 3)), np.uint64)
    kernels.contexts(columns, len(columns), ORDER, visits, keys)
    return [[int(key) for key in family] for family in keys]


@settings(deadline=None)
@given(HISTORIES, st.sampled_from([0, 1, VISITS]))
def test_a_key_stands_for_one_context_and_a_context_has_one_key(histories: list[str], visits: int) -> None:
    meant: dict[int, object] = {}
    for history in histories:
        for family, keys in zip(families(history, visits), keys_of(history, visits), strict=True):
            assert keys[len(family) :] == [0] * (len(keys) - len(family)), "there are no longer contexts"
            for context, key in zip(family, keys, strict=False):
                assert meant.setdefault(key, context) == context
    assert len(set(meant.values())) == len(meant)


@settings(deadline=None)
@given(HISTORIES, HISTORIES)
def test_counts_expect_what_slow_counts_expect(runs: list[str], asked: list[str]) -> None:
    options = CountsOptions(order=ORDER, visits=VISITS, horizon=HORIZON)
    counts, slow = VariableOrderCounts(options), Slow(options)
    for run in ["abc", *runs]:
        for i in range(len(run), -1, -1):  # so that all three agents are known from the first observation on
            counts.observe("swe", run[:i], run[i] if i < len(run) else None)
            slow.observe(run[:i], (run + ".")[i])
    for history, forecast in zip(asked, counts.forecasts("swe", asked, HORIZON), strict=True):
        assert forecast is not None and forecast.agents == ("a", "b", "c")
        np.testing.assert_allclose(forecast.step, slow.forecast(history), atol=1e-6)


@settings(deadline=None)
@given(HISTORIES, HISTORIES)
def test_a_forecast_leaves_no_trace(runs: list[str], asked: list[str]) -> None:
    counts = VariableOrderCounts(CountsOptions(order=ORDER, horizon=HORIZON))
    counts.observe("swe", "abc", "a")
    for run in runs:
        counts.observe("swe", run, "b")
    rows = counts._workflows["swe"].rows
    before = len(rows), rows.counts.copy(), rows.slots.copy()
    counts.forecasts("swe", asked, HORIZON)
    assert before[0] == len(rows)
    assert (before[1] == rows.counts).all() and (before[2] == rows.slots).all()


@settings(deadline=None)
@given(st.lists(st.text("abcd", max_size=30), min_size=1, max_size=20))
def test_every_context_is_found_again_however_the_table_has_grown_and_shrunk(runs: list[str]) -> None:
    counts = VariableOrderCounts(CountsOptions(max_contexts=150))
    for run in runs:
        counts.observe("swe", run, "a")
    rows = counts._workflows["swe"].rows
    assert len(rows) <= 150
    assert sorted(rows.slots[rows.slots > 0]) == list(range(1, len(rows) + 1))
    slots = np.zeros_like(rows.slots)
    kernels.fill(slots, rows.keys, rows.used)
    found = {int(rows.keys[row]) for row in slots[slots > 0]}
    assert found == {int(key) for key in rows.keys[1 : rows.used]} and len(found) == len(rows)
    np.testing.assert_allclose(rows.counts.sum(2), rows.totals)
    assert not rows.counts[0].any() and not rows.counts[rows.used :].any()


@settings(deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 5), st.integers(1, 4))
def test_waits_add_up_step_by_step(seed: int, runs: int, steps: int) -> None:
    """The first wait is that of the pair, each later one that of the agent called before it."""
    generator = np.random.default_rng(seed)
    waits = Waits()
    for _ in range(10):
        agent, following = generator.choice(["a", "b"], 2)
        waits.observe(agent, following, generator.lognormal())
    current = [*generator.choice(["a", "b", "new"], runs)]
    likely = generator.dirichlet(np.ones(3), (runs, steps))
    expected = waits.expected(current, ["a", "b"], likely)
    assert expected is not None and expected.shape == (runs, steps)
    for run, agent in enumerate(current):
        alive = likely[run, :, :2] / likely[run, :, :2].sum(1, keepdims=True)
        first = [waits.of(agent, following).mean() for following in "ab"]
        later = [waits.of(following).mean() for following in "ab"]
        each = [alive[0] @ first, *(alive[:-1] @ later)]
        np.testing.assert_allclose(expected[run], np.cumsum(each))


def test_where_no_folder_can_be_written_to_a_loop_is_compiled_without_being_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compile_now = numba.njit

    def njit(**options: object) -> object:
        if options.get("cache"):
            raise RuntimeError("cannot cache function: no locator available")
        return compile_now(**options)

    monkeypatch.setattr(numba, "njit", njit)

    @compiled
    def doubled(number: int) -> int:
        return 2 * number

    assert doubled(3) == 6
    assert doubled.signatures, "it is compiled"

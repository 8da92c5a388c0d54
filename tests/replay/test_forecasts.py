"""The controller's part of a replay: what it learns from calls, and that a second policy is given the same."""

import numpy as np

from pbkv_ray.predict.counts import VariableOrderCounts
from pbkv_ray.replay.forecasts import Forecasts, Made
from pbkv_ray.replay.owned import OwnedDriver
from pbkv_ray.replay.tree import TreeOptions

LOOP = ("plan", "code", "plan", "code", "plan")


def served(forecasts: Forecasts, run: str, lengths: tuple[int, ...]) -> list[list[float]]:
    """The first step of every forecast while the run calls along LOOP and answers with these lengths."""
    steps = []
    for made in range(1, len(lengths) + 1):
        history = LOOP[:made]
        started = forecasts.started(run, "w", history, float(made))
        answered, began_s = forecasts.answered(run, "w", history, lengths[made - 1])
        assert began_s == made
        steps += [forecast.step[0].tolist() for forecast in (started, answered) if forecast is not None]
    forecasts.ended(run, "w", LOOP[: len(lengths)])
    forecasts.ended(run, "w", LOOP[: len(lengths)])  # every replica of a cluster says so
    return steps


def test_a_short_plan_ends_the_run() -> None:
    forecasts = Forecasts(VariableOrderCounts())
    for i in range(20):
        served(forecasts, f"a{i}", (300, 50, 300, 50, 5))
        served(forecasts, f"b{i}", (300, 50, 5))
    forecasts.started("now", "w", LOOP[:1], 1.0)
    forecasts.answered("now", "w", LOOP[:1], 300)
    forecasts.started("now", "w", LOOP[:2], 2.0)
    forecasts.answered("now", "w", LOOP[:2], 50)
    started = forecasts.started("now", "w", LOOP[:3], 3.0)
    short, _ = forecasts.answered("now", "w", LOOP[:3], 5)
    long, _ = forecasts.answered("now", "w", LOOP[:3], 300)
    assert started is not None and short is not None and long is not None
    assert long.step[0, -1] < started.step[0, -1] < short.step[0, -1]


def test_a_second_policy_is_given_the_forecasts_of_the_first_and_learns_nothing() -> None:
    made: Made = {}
    first = served(Forecasts(VariableOrderCounts(), keep=made), "r", (300, 50, 300))
    assert set(made) == {("r", calls, answered) for calls in (1, 2, 3) for answered in (False, True)}
    idle = VariableOrderCounts()
    assert served(Forecasts(idle, made=made), "r", (300, 50, 300)) == first
    assert idle.forecast("w", LOOP[:1], 3) is None


def test_noise_is_mixed_into_what_is_given_and_not_into_what_is_kept() -> None:
    made: Made = {}
    exact = served(Forecasts(VariableOrderCounts(), keep=made), "r", (300, 50, 300))
    noisy = served(Forecasts(VariableOrderCounts(), noise=1.0, made=made), "r", (300, 50, 300))
    assert np.allclose([row[-1] for row in noisy], [row[-1] for row in exact])  # END keeps its probability
    assert all(np.allclose(row[:-1], row[0]) for row in noisy)


def test_a_cache_hears_of_an_answer_what_it_changes() -> None:
    forecasts = Forecasts(VariableOrderCounts())
    for i in range(20):
        served(forecasts, f"a{i}", (300, 50, 300, 50, 5))
        served(forecasts, f"b{i}", (300, 50, 5))
    driver = OwnedDriver("pbkv+", TreeOptions(100), 1, forecasts=forecasts)
    ends = []
    for made, tokens in ((1, 300), (2, 50), (3, 5)):
        for hear in ("started", "answered"):
            if hear == "started":
                driver.call_started("now", "w", LOOP[:made], float(made))
            else:
                driver.call_finished("now", "w", LOOP[:made], tokens, made + 0.5)
            heard = driver.index.owners.runs["now"].forecast
            assert heard is not None
            ends.append(round(float(heard.step[0, -1]), 1))
    assert ends == [0.0, 0.0, 0.0, 0.0, 0.5, 0.9]
    assert driver.index.owners.runs["now"].made_s == 3.0  # waits are those of the call's start


def test_whoever_knows_the_future_is_not_told_more_by_an_answer() -> None:
    oracle = Forecasts(VariableOrderCounts(), agents={"r": LOOP})
    started = oracle.started("r", "w", LOOP[:1], 7.0)
    assert started is not None and started.step[0].tolist() == [0.0, 1.0, 0.0]
    assert oracle.answered("r", "w", LOOP[:1], 300) == (None, 7.0)

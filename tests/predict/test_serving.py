"""In service: counts first, the net when it has proved itself, counts again when it drifts, breaks or dawdles."""

import asyncio
import json
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from pbkv_ray.core.forecast import Forecast
from pbkv_ray.predict.background import Background
from pbkv_ray.predict.features import Paths
from pbkv_ray.predict.folder import ModelFolder
from pbkv_ray.predict.serving import CallFacts, Served, ServingOptions
from tests.predict.fake_net import net


def after_a(said: Sequence[float]) -> object:
    """A net that says `said` [a, x, y, END] after a, and END otherwise."""
    return lambda paths: [said if current == 0 else [0, 0, 0, 1] for current in paths.current]


def live(served: Served, *paths: str) -> list[Forecast]:
    """Each run asks before every call; the forecasts after the first call are returned."""
    firsts = []
    for path in paths:
        for i in range(len(path) + 1):
            forecast = served.forecast("swe", path[:i], 10)
            if i == 1 and forecast is not None:
                firsts.append(forecast)
            served.observe("swe", path[:i], path[i] if i < len(path) else None)
    return firsts


def test_a_better_net_joins_after_it_was_seen_to_be_better() -> None:
    served = Served(options=ServingOptions(least=20))
    live(served, *["ax", "ay"] * 20)
    served.install("swe", net(after_a([0, 0.5, 0.5, 0])))
    assert not served.gates()["swe"].open
    live(served, *["ax", "ay"] * 3)
    assert not served.gates()["swe"].open, "too few calls were judged"
    # Now only x: counts learn it slowly, this net knows it.
    served.install("swe", net(after_a([0, 1, 0, 0])))
    forecasts = live(served, *["ax"] * 20)
    assert served.gates()["swe"].open
    x = [forecast.step[0, forecast.agents.index("x")] for forecast in forecasts]
    assert x[0] < 0.6 and x[-1] > 0.95
    assert served.counters["forecasts_net"] > 0


def test_the_net_is_mixed_into_what_the_length_of_the_answer_has_made_of_the_counts() -> None:
    served = Served(options=ServingOptions(least=20))
    for following, tokens in [("x", 5), ("y", 900)] * 20:
        for made in range(3):
            path = ("a", following)[:made]
            after = ("a", following, None)[made]
            served.observe("swe", path, after, answers=[tokens, 1][:made])
    served.install("swe", net(after_a([0, 0.5, 0.5, 0])))
    facts = [CallFacts(output_tokens=5), CallFacts(output_tokens=900), None]

    def likely_x() -> list[float]:
        made = served.forecasts("swe", ["a", "a", "a"], 10, facts)
        return [float(f.step[0, f.agents.index("x")]) for f in made if f is not None]

    plain = served.counts.forecast("swe", "a", 10)
    assert plain is not None
    refined = [served.refined("swe", "a", tokens, plain).step[0, plain.agents.index("x")] for tokens in (5, 900)]
    assert likely_x() == pytest.approx([*refined, 0.5], abs=0.01)  # the gate is closed: counts alone
    served.gates()["swe"].open = True
    short, long, unknown = likely_x()
    assert refined[0] > short > unknown > long > refined[1]  # the net, which takes both for as likely, is mixed in


def test_a_net_that_drifts_leaves_and_may_come_back() -> None:
    served = Served(options=ServingOptions(least=10, memory=20))
    live(served, *["ax", "ay"] * 20)
    served.install("swe", net(after_a([0, 1, 0, 0])))
    live(served, *["ax"] * 30)
    assert served.gates()["swe"].open
    live(served, *["ay"] * 30)
    assert not served.gates()["swe"].open
    forecast, alone = served.forecast("swe", "a", 10), served.counts.forecast("swe", "a", 10)
    assert forecast is not None and alone is not None
    assert (forecast.step == alone.step).all()
    live(served, *["ax"] * 60)
    assert served.gates()["swe"].open


def test_a_net_that_breaks_or_lies_is_dropped_and_counts_answer() -> None:
    def breaks(_: object) -> list[list[float]]:
        raise ZeroDivisionError

    for tell in (breaks, after_a([0, float("nan"), 0, 0])):
        served = Served()
        live(served, "ax", "ay")
        served.install("swe", net(tell))
        (forecast,) = live(served, "ax")
        assert np.isfinite(forecast.step).all()
        assert served.counters["net_errors"] == 1
        assert served.gates() == {}


def test_a_slow_net_is_dropped() -> None:
    served = Served(options=ServingOptions(slow_s=1e-9))
    served.install("swe", net(after_a([0, 1, 0, 0])))
    live(served, *["ax"] * 40)
    assert served.counters["net_slow"] == 1
    assert served.gates() == {}


def test_agents_that_the_net_does_not_know_keep_the_counts_columns() -> None:
    served = Served(options=ServingOptions(least=5))
    served.install("swe", net(after_a([0, 1, 0, 0])))
    live(served, *["axz"] * 30)
    forecast = served.forecast("swe", "ax", 10)
    assert forecast is not None
    assert set(forecast.agents) == {"a", "x", "z"}
    np.testing.assert_allclose(forecast.step.sum(1), 1.0)


def test_what_is_known_of_a_call_reaches_the_net_and_no_other_run() -> None:
    seen: list[float] = []

    def tell(paths: Paths) -> list[list[float]]:
        seen.extend(paths.vectors[:, -3].tolist())
        return [[0, 1, 0, 0]] * len(paths)

    served = Served()
    live(served, "ax")
    served.install("swe", net(tell))
    served.forecasts("swe", ["a", "a"], 10, [CallFacts(prompt_tokens=100, output_tokens=5), None])
    assert seen == [pytest.approx(np.log(101) / 8), 0.0]


def test_the_net_weighs_more_the_more_is_known_of_the_call() -> None:
    made = net(lambda paths: [[0, 1, 0, 0]] * len(paths))
    weights = {"prefilled": [0.5] * 10, "finished": [1.0] * 10}
    object.__setattr__(made, "mixture", np.zeros(10))
    object.__setattr__(made, "facts", {"mixture_later": weights})
    object.__setattr__(made, "signals", ("prefill",))
    object.__setattr__(made, "tensors", {"text.prefill.0.weight": np.ones(2)})
    served = Served()
    live(served, *["ay"] * 40)
    served.install("swe", made)
    served.gates()["swe"].open = True
    state = {"prefill": np.ones(2, np.float16)}
    facts = [None, CallFacts(100), CallFacts(hidden=state), CallFacts(100, 5), CallFacts(100, 5, state)]
    live(served, "ax")
    forecasts = served.forecasts("swe", ["a"] * 5, 10, facts)
    x = [round(float(one.step[0, one.agents.index("x")]), 1) for one in forecasts if one is not None]
    assert x == [0.0, 0.0, 0.5, 0.0, 1.0]


def test_nothing_is_forecast_for_an_unknown_workflow() -> None:
    served = Served()
    assert served.forecast("hover", "a", 3) is None
    served.install("hover", net(after_a([0, 1, 0, 0])))
    assert served.forecast("hover", "a", 3) is None, "without counts there are no columns"


def test_a_new_model_folder_is_taken_and_a_broken_one_reported(tmp_path: Path) -> None:
    models = ModelFolder(tmp_path)
    assert models.fresh() == {}
    broken = tmp_path / "swe"
    broken.mkdir()
    (broken / "config.json").write_text(json.dumps({"format": 7}))
    assert models.fresh() == {}
    assert "has format 7" in models.errors["swe"]
    assert models.fresh() == {}, "it is not tried again until it changes"


class Answers:
    """What a Background delivered; `until(run_id)` waits for it."""

    def __init__(self, served: Served, **options: int) -> None:
        self.got: list[tuple[str, tuple[str, ...], float]] = []
        self._news = asyncio.Event()
        self.background = Background(served, self._deliver, **options)

    def _deliver(self, run_id: str, history: tuple[str, ...], call: CallFacts | None, forecast: Forecast) -> None:
        self.got.append((run_id, history, round(float(forecast.step[0, forecast.agents.index("x")]), 1)))
        self._news.set()

    async def until(self, run_id: str) -> None:
        while not any(got[0] == run_id for got in self.got):
            await asyncio.wait_for(self._news.wait(), 10)
            self._news.clear()


def with_open_gate(tell: object, workflow: str = "swe", **options: float) -> Served:
    served = Served(options=ServingOptions(**options))  # type: ignore[arg-type]
    for i in range(3):
        served.observe(workflow, "axy"[:i], "axy"[i])
    served.install(workflow, net(tell))
    served.gates()[workflow].open = True
    return served


async def test_the_newest_request_of_each_run_is_answered_off_the_event_loop() -> None:
    served = with_open_gate(lambda paths: [[0, 1, 0, 0]] * len(paths))
    answers = Answers(served, batch=2, max_waiting=3)
    background = answers.background
    background.submit("lost", "swe", "a")
    background.submit("one", "swe", "a")
    background.submit("one", "swe", "ax")
    background.submit("unknown", "hover", "a")
    background.submit("last", "swe", "a")
    task = asyncio.create_task(background.run())
    await answers.until("last")
    task.cancel()
    assert answers.got == [("one", ("a", "x"), 0.9), ("last", ("a",), 0.9)]
    assert background.counters == {"dropped": 1, "delivered": 2}


async def test_counts_are_not_delivered_a_second_time() -> None:
    served = with_open_gate(lambda paths: [[0, 1, 0, 0]] * len(paths))
    served.gates()["swe"].open = False
    job = served.begin("swe", ["a"], 10)
    assert job is not None
    assert served.finish(job, *job.run()) == [None]


def beside_hover(served: Served) -> None:
    """A second workflow, whose net works and whose gate is open."""
    for i in range(3):
        served.observe("hover", "axy"[:i], "axy"[i])
    served.install("hover", net(lambda paths: [[0, 1, 0, 0]] * len(paths)))
    served.gates()["hover"].open = True


async def test_a_net_that_hangs_holds_up_neither_the_loop_nor_other_workflows() -> None:
    released = threading.Event()

    def hangs(paths: Paths) -> list[list[float]]:
        released.wait(30)
        return [[0, 1, 0, 0]] * len(paths)

    served = with_open_gate(hangs, stuck_s=0.01)
    beside_hover(served)
    answers = Answers(served)
    answers.background.submit("stuck", "swe", "a")
    answers.background.submit("free", "hover", "a")
    task = asyncio.create_task(answers.background.run())
    await answers.until("free")
    task.cancel()
    released.set()
    assert answers.got == [("free", ("a",), 0.9)]
    assert served.counters["net_stuck"] == 1
    assert list(served.gates()) == ["hover"], "the net that hung is out of service"


async def test_a_net_that_raises_or_lies_in_its_thread_is_dropped_and_the_next_batch_goes_on() -> None:
    def breaks(_: object) -> list[list[float]]:
        raise ZeroDivisionError

    for tell in (breaks, lambda paths: [[0, float("nan"), 0, 0]] * len(paths)):
        served = with_open_gate(tell)
        beside_hover(served)
        answers = Answers(served)
        answers.background.submit("one", "swe", "a")
        answers.background.submit("two", "hover", "a")
        task = asyncio.create_task(answers.background.run())
        await answers.until("two")
        task.cancel()
        assert served.counters["net_errors"] == 1
        assert list(served.gates()) == ["hover"]


async def test_what_hears_the_answers_may_fail_and_the_next_batch_goes_on() -> None:
    served = with_open_gate(lambda paths: [[0, 1, 0, 0]] * len(paths))
    heard = asyncio.Event()

    def deliver(run_id: str, history: tuple[str, ...], call: CallFacts | None, forecast: Forecast) -> None:
        if run_id == "one":
            raise ZeroDivisionError
        heard.set()

    background = Background(served, deliver, batch=1)
    background.submit("one", "swe", "a")
    background.submit("two", "swe", "a")
    task = asyncio.create_task(background.run())
    await asyncio.wait_for(heard.wait(), 10)
    task.cancel()
    assert background.counters["errors"] == 1


def test_each_run_is_judged_by_its_own_forecast() -> None:
    """Two runs with the same path so far: what the net said of one says nothing about the other."""

    def tell(paths: Paths) -> list[list[float]]:
        # The token counts tell the two apart: 100 is followed by x, 200 by y.
        known = paths.vectors[:, -3]
        return [[0, 0.99, 0.01, 0] if value < np.log(150) / 8 else [0, 0.01, 0.99, 0] for value in known]

    served = with_open_gate(tell, least=1, memory=1e9)
    served.gates()["swe"].open = False
    for turn in range(20):
        runs = [f"x{turn}", f"y{turn}"]
        facts = [CallFacts(prompt_tokens=100), CallFacts(prompt_tokens=200)]
        served.forecasts("swe", ["a", "a"], 10, facts, runs)
        served.observe("swe", "a", "x", runs[0])
        served.observe("swe", "a", "y", runs[1])
    gate = served.gates()["swe"]
    assert gate.judged == 40
    assert gate.open and gate.net > -0.2 > gate.counts

"""In service: counts first, the net when it has proved itself, counts again when it drifts, breaks or dawdles."""

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from pbkv_ray.core.forecast import Forecast
from pbkv_ray.predict.background import Background
from pbkv_ray.predict.features import PathFeatures
from pbkv_ray.predict.inference import ServedNet
from pbkv_ray.predict.serving import CallFacts, ModelFolder, Served, ServingOptions

AGENTS = ("a", "x", "y")


class FakeNet(ServedNet):
    """Answers `tell(paths)` [paths, agents + 1] for the first step, and END after it."""

    __slots__ = ("hidden", "tell")

    def states(self, added: Sequence[str], transitions: object) -> np.ndarray:
        return np.zeros((len(self.agents) + 1 + len(added), 1))

    def forecast(self, states: np.ndarray, paths: Sequence[PathFeatures], hidden: object = ()) -> np.ndarray:
        added = len(states) - len(self.agents) - 1
        said = np.zeros((len(paths), self.horizon, len(self.agents) + 1))
        said[:, 0] = self.tell(paths)
        said[:, 1:, -1] = 1.0
        return np.concatenate((said[..., :-1], np.zeros((*said.shape[:2], added)), said[..., -1:]), -1)


def net(tell: object, agents: tuple[str, ...] = AGENTS) -> FakeNet:
    made = FakeNet(agents, 10, (), np.ones(10), np.full(10, 0.9), np.zeros((1, 1)), {})
    object.__setattr__(made, "tell", tell)
    return made


def after_a(said: Sequence[float]) -> object:
    """A net that says `said` [a, x, y, END] after a, and END otherwise."""
    return lambda paths: [said if path.current == 0 else [0, 0, 0, 1] for path in paths]


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

    def tell(paths: Sequence[PathFeatures]) -> list[list[float]]:
        seen.extend(float(path.vector()[-3]) for path in paths)
        return [[0, 1, 0, 0]] * len(paths)

    served = Served()
    live(served, "ax")
    served.install("swe", net(tell))
    served.forecasts("swe", ["a", "a"], 10, [CallFacts(prompt_tokens=100, output_tokens=5), None])
    assert seen == [pytest.approx(np.log(101) / 8), 0.0]


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


async def test_the_newest_request_of_each_run_is_answered_off_the_event_loop() -> None:
    served = Served()
    live(served, *["axy"] * 10)
    got: list[tuple[str, tuple[str, ...]]] = []
    done = asyncio.Event()

    def deliver(run_id: str, history: tuple[str, ...], forecast: Forecast) -> None:
        got.append((run_id, history))
        if run_id == "last":
            done.set()

    background = Background(served, deliver, batch=2, max_waiting=3)
    background.submit("lost", "swe", "a")
    background.submit("one", "swe", "a")
    background.submit("one", "swe", "ax")
    background.submit("unknown", "hover", "a")
    background.submit("last", "swe", "a")
    task = asyncio.create_task(background.run())
    await asyncio.wait_for(done.wait(), 10)
    task.cancel()
    assert got == [("one", ("a", "x")), ("last", ("a",))]
    assert background.counters == {"dropped": 1, "delivered": 2}

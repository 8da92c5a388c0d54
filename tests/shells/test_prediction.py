"""The predictor inside the controller: first what counts say, then what the net says, and calls never wait for it."""

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pbkv_ray.config import ControllerOptions
from pbkv_ray.control.actor import ControllerHost
from pbkv_ray.control.exposition import controller_text
from pbkv_ray.core.actions import PublishForecast
from pbkv_ray.core.events import Batch, CallFinished, CallStarted, CallState, Event, RunEnded, RunStarted
from pbkv_ray.predict import background
from pbkv_ray.predict.features import Paths
from pbkv_ray.predict.folder import ModelFolder
from pbkv_ray.predict.inference import ServedNet
from tests.predict.fake_net import FakeNet, net

EDGES = (("__start__", "a"), ("a", "x"), ("a", "y"), ("x", "__end__"), ("y", "__end__"))


class Application:
    """A controller without Ray, whose models folder holds `model` from `put` on, and one replica that listens."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        self.fresh: dict[str, ServedNet] = {}
        monkeypatch.setattr(ModelFolder, "fresh", lambda _: self._take())
        self.host = ControllerHost(ControllerOptions(predictor_models=str(tmp_path)))
        self._sequence = 0
        self._number: int | None = 0

    def _take(self) -> dict[str, ServedNet]:
        fresh, self.fresh = self.fresh, {}
        return fresh

    async def put(self, model: ServedNet, *, gate: bool = True) -> None:
        """As a new model folder would be taken: installed by the watcher."""
        self.fresh = {"swe": model}
        await self.send()
        async with asyncio.timeout(30):
            while "predictor_gate_open/swe" not in await self.host.counts():
                await asyncio.sleep(0.001)
        self.host._prediction._served.gates()["swe"].open = gate

    async def send(self, *events: Event) -> None:
        await self.host.events(Batch("runner", self._sequence, events))
        self._sequence += len(events)

    async def hints(self) -> list[PublishForecast]:
        _, self._number, actions = await self.host.hints("e", "1", self.host.epoch, self._number or 0, 10.0)
        return [action for action in actions if isinstance(action, PublishForecast)]


@pytest.fixture
def application(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Application:
    return Application(monkeypatch, tmp_path)


def start(run_id: str = "r1") -> tuple[Event, ...]:
    return RunStarted(run_id, "swe", 1.0, ("a", "x", "y"), EDGES), CallStarted(run_id, "a", 1, f"{run_id}-1", 1.5)


def x_of(hint: PublishForecast) -> float:
    return float(hint.forecast.step[0, hint.forecast.agents.index("x")])


async def test_counts_answer_at_once_and_the_net_a_moment_later(application: Application):
    await application.put(net(lambda paths: [[0, 1, 0, 0]] * len(paths)))
    assert await application.host.hints("e", "1", None, 0, 0.001) == (application.host.epoch, 0, ())
    await application.send(*start())
    first, *more = await application.hints()
    (second,) = more or await application.hints()
    assert (first.version, second.version) == (1, 2)
    assert x_of(first) < 0.6 and x_of(second) > 0.9


async def test_every_new_fact_of_a_call_brings_a_new_forecast_and_the_next_call_ends_it(application: Application):
    seen: list[tuple[float, float, int]] = []

    class Reading(FakeNet):
        __slots__ = ()

        def widths(self) -> dict[str, int]:
            return {"prefill": 2, "decode": 2}

        def forecast(self, states, paths: Paths, hidden=()):
            for h, known in zip(hidden, paths.vectors[:, -4], strict=True):
                first = [float(h[signal][0]) if signal in h else 0.0 for signal in ("prefill", "decode")]
                seen.append((*first, int(known)))
            return super().forecast(states, paths, hidden)

    made = net(lambda paths: [[0, 1, 0, 0]] * len(paths), kind=Reading)
    await application.put(made)
    await application.host.hints("e", "1", None, 0, 0.001)

    async def until(version: int) -> None:
        async with asyncio.timeout(30):
            while not any(hint.version >= version for hint in await application.hints()):
                pass  # an older forecast that nobody has asked for yet gives way to a newer one

    await application.send(*start())
    await until(2)
    await application.host.states([CallState("r1-1", "prefill", np.array([3, 0], np.float16))], 0)
    await until(3)
    await application.send(CallFinished("r1", "a", 1, "r1-1", 2.0, "stop", 100, 5))
    await until(4)
    await application.host.states([CallState("r1-1", "decode", np.array([4, 0], np.float16))], 0)
    await until(5)
    assert seen == [(0.0, 0.0, 0), (3.0, 0.0, 0), (3.0, 0.0, 1), (3.0, 4.0, 1)]
    await application.send(RunEnded("r1", "completed", 3.0))
    await application.host.states([CallState("r1-1", "decode", np.array([5, 0], np.float16))], 0)
    assert len(seen) == 4, "the run has ended: nobody asks any more"


async def test_states_of_another_model_are_not_shown_to_the_net(application: Application):
    made = net(lambda paths: [[0, 1, 0, 0]] * len(paths))
    await application.put(made)
    await application.send(*start())
    await application.host.states([CallState("r1-1", "prefill", np.ones(576, np.float16))], 0)
    async with asyncio.timeout(30):
        while (await application.host.counts()).get("predictor_requests_delivered", 0) < 1:
            await asyncio.sleep(0.001)
    assert (await application.host.counts()).get("predictor_net_errors", 0) == 0


async def test_a_net_that_hangs_is_left_alone_and_calls_are_heard_meanwhile(application: Application):
    released = threading.Event()

    def hangs(paths: Paths) -> list[list[float]]:
        released.wait(60)
        return [[0, 1, 0, 0]] * len(paths)

    await application.put(net(hangs))
    await application.host.hints("e", "1", None, 0, 0.001)
    try:
        await application.send(*start())
        (hint,) = await application.hints()  # the net hangs by now
        assert (hint.version, x_of(hint) < 0.6) == (1, True)
        await application.send(CallStarted("r1", "x", 2, "r1-2", 2.0), RunEnded("r1", "completed", 3.0))
        assert await application.host.outcome("r1") == "completed"
        async with asyncio.timeout(30):
            while (await application.host.counts()).get("predictor_net_stuck", 0) == 0:
                await asyncio.sleep(0.01)
    finally:
        released.set()
    assert "predictor_gate_open/swe" not in await application.host.counts(), "it is out of service"


@pytest.mark.parametrize("turns", range(4))
async def test_an_answer_in_the_moment_of_the_end_keeps_nothing_alive(
    application: Application, monkeypatch: pytest.MonkeyPatch, turns: int
):
    answers: list[tuple[asyncio.Future[Any], Any]] = []

    async def in_our_hands(work: Callable[[], Any]) -> Any:
        answers.append((asyncio.get_running_loop().create_future(), work()))
        return await answers[-1][0]

    monkeypatch.setattr(background, "_in_thread", in_our_hands)
    await application.put(net(lambda paths: [[0, 1, 0, 0]] * len(paths)))
    await application.send(*start())
    async with asyncio.timeout(30):
        while not answers:
            await asyncio.sleep(0)
    (task,) = [task for task in asyncio.all_tasks() if task.get_name() == "pbkv-net"]
    answers[0][0].set_result(answers[0][1])
    for _ in range(turns):
        await asyncio.sleep(0)
    task.cancel()
    assert await asyncio.wait([task], timeout=30) == ({task}, set())


async def test_a_net_that_raises_leaves_the_counts_in_charge_until_a_new_one_comes(application: Application):
    await application.put(net(lambda paths: 1 / 0))
    await application.send(*start())
    async with asyncio.timeout(30):
        while (await application.host.counts()).get("predictor_net_errors", 0) == 0:
            await asyncio.sleep(0.001)
    await application.send(*start("r2"))
    counts = await application.host.counts()
    assert (counts["action_PublishForecast"], counts.get("forecasts_missing", 0)) == (2, 0)
    assert "predictor_gate_open/swe" not in counts


async def test_what_the_predictor_does_is_in_the_metrics(application: Application):
    await application.put(net(lambda paths: [[0, 1, 0, 0]] * len(paths)))
    await application.send(*start())
    text = controller_text(await application.host.counts())
    assert 'pbkv_controller_predictor_gate_open{workflow="swe"} 1.0' in text
    assert 'pbkv_controller_predictor_gate_judged{workflow="swe"} 0.0' in text
    assert "pbkv_controller_predictor_nets_installed_total 1.0" in text
    assert "pbkv_controller_predictor_models_broken 0.0" in text
    assert "pbkv_controller_predictor_forecasts_counts_total 1.0" in text


async def test_without_a_models_folder_there_are_counts_and_no_net():
    host = ControllerHost(ControllerOptions())
    await host.events(Batch("runner", 0, start()))
    counts = await host.counts()
    assert counts["action_PublishForecast"] == 1
    assert not any(name.startswith("predictor_gate") for name in counts)

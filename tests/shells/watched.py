"""A real controller core that has heard of as many runs and replicas as a test of the live page wants."""

from collections.abc import Iterable
from typing import Any

import numpy as np

from pbkv_ray.config import ControllerOptions
from pbkv_ray.core.controller import Controller
from pbkv_ray.core.events import CallFinished, CallStarted, ReplicaJoined, Residency, RunStarted, ToolWaiting
from pbkv_ray.core.forecast import Forecast
from pbkv_ray.core.live import LiveView

AGENTS = ("planner", "coder", "tester", "analyser", "committer")


class FakePredictor:
    """Says the same of every run: the next agent in the row, or the end."""

    def prior(self, workflow: str, agents: Any, edges: Any) -> None: ...

    def observe(
        self, workflow: str, history: Any, following: str | None, run_id: str = "", answers: Any = ()
    ) -> None: ...

    def observe_wait(self, workflow: str, agent: str, following: str, seconds: float) -> None: ...

    def refined(self, workflow: str, agent: str, tokens: int, forecast: Forecast) -> Forecast:
        return forecast

    def forecast(self, workflow: str, history: Any, horizon: int) -> Forecast:
        step = np.full((horizon, len(AGENTS) + 1), 0.04)
        step[:, (AGENTS.index(history[-1]) + 1) % len(AGENTS)] = 0.8
        return Forecast(AGENTS, step)


class FakeController:
    """The actor's `live`, in process. `asked` counts the questions."""

    def __init__(self, now_s: float = 1_000.0) -> None:
        self.now_s = now_s
        self.asked = 0
        self.error: Exception | None = None
        self.controller = Controller(ControllerOptions(), FakePredictor())
        self.view = LiveView(self.controller)

    async def __call__(self, limit: int) -> dict[str, Any]:
        self.asked += 1
        if self.error is not None:
            raise self.error
        return self.view.snapshot(self.now_s, limit)

    def hear(self, *events: Any) -> None:
        self.view.performed(self.controller.handle(*events))

    def run(self, run_id: str, number: int = 0, workflow: str = "swe") -> None:
        """It has made `number` % 5 calls, and makes one more or waits for a tool, a human or nobody."""
        at_s = self.now_s - 600 + number / 10
        self.hear(RunStarted(run_id, workflow, at_s))
        made = number % 5
        for step in range(made + 1):
            agent = AGENTS[step % len(AGENTS)]
            self.hear(CallStarted(run_id, agent, step, f"{run_id}-{step}", at_s))
            if step == made and number % 3 == 0:
                return
            done = CallFinished(
                run_id, agent, step, f"{run_id}-{step}", at_s, "stop", 900, 60, 500 + 40 * step, 120, 1.0, "engine#0"
            )
            self.hear(done)
        if number % 3 == 1:
            self.hear(ToolWaiting(run_id, "interrupt" if number % 2 else "run_tests", 1, at_s))

    def replica(self, name: str, runs: Iterable[str], **numbers: float) -> None:
        held = {run: (1 + 37 * (n % 11), 900) for n, run in enumerate(runs)}
        self.hear(ReplicaJoined(name, "e1", self.now_s), Residency(name, "e1", self.now_s, held, 120))
        pools = {"state": 2, "device_pool": 16_384, "device_free": 2_200, "device_retired": 3_100}
        pools |= {"host_pool": 32_768, "host_free": 9_000, "host_retired": 8_000}
        self.view.reported(name, "e1", pools | numbers)

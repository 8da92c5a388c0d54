"""The snapshot for the live page: whole, bounded, and honest about what nobody reports."""

import json

import numpy as np

from pbkv_ray.config import ControllerOptions
from pbkv_ray.core.controller import Controller
from pbkv_ray.core.events import (
    AgentEntered,
    CallFinished,
    CallStarted,
    Event,
    ReplicaJoined,
    Residency,
    RunEnded,
    RunStarted,
    ToolWaiting,
)
from pbkv_ray.core.forecast import Forecast
from pbkv_ray.core.live import TOTALS, LiveOptions, LiveView
from tests.core.test_controller import FakePredictor


class Watched:
    """A controller and its view, joined as `control.actor` joins them."""

    def __init__(self, **options: int) -> None:
        self.predictor = FakePredictor()
        self.controller = Controller(ControllerOptions(), self.predictor)
        self.view = LiveView(self.controller, LiveOptions(**options))

    def hear(self, *events: Event) -> None:
        self.view.performed(self.controller.handle(*events))


def test_a_run_in_flight_shows_its_agent_its_path_and_its_next_three_calls() -> None:
    watched = Watched()
    step = np.array([[0.75, 0.15, 0.1], [0.5, 0.0, 0.5], [0.0, 0.5, 0.5], [1.0, 0.0, 0.0]])
    watched.predictor.forecast_made = Forecast(("coder", "tester"), step)
    watched.hear(
        RunStarted("r1", "swe", 1.0),
        AgentEntered("r1", "planner", 1, 1.0),
        CallStarted("r1", "planner", 1, "c1", 2.0),
        CallFinished("r1", "planner", 1, "c1", 3.0, "stop", 100, 7, 60, 20, 1.0, "a"),
        CallStarted("r1", "coder", 2, "c2", 4.0),
    )
    snapshot = watched.view.snapshot(5.0, limit=10)
    assert snapshot["runs"] == {
        "active": 1,
        "states": {"calling": 1},
        "workflows": {"swe": 1},
        "rows": [
            {
                "run_id": "r1",
                "workflow": "swe",
                "state": "calling",
                "now": ["coder", "planner"],
                "waiting_for": None,
                "path": ["planner", "coder"],
                "calls": 2,
                # Of the second call: it is made with 0.9, and then by the coder with 0.5.
                "forecast": [
                    [("coder", 0.75), ("tester", 0.15), ("END", 0.1)],
                    [("END", 0.55), ("coder", 0.45)],
                    [("END", 0.775), ("tester", 0.225)],
                ],
                "home": "a",
                "started_s": 1.0,
                "seen_s": 4.0,
                "prompt_tokens": 100,
                "device_cached_tokens": 60,
                "host_cached_tokens": 20,
            }
        ],
    }
    json.dumps(snapshot)


def test_waiting_for_a_tool_and_for_a_human_are_told_apart_and_an_ended_run_is_gone() -> None:
    watched = Watched()
    watched.hear(
        RunStarted("tool", "swe", 1.0),
        ToolWaiting("tool", "tester", 1, 2.0),
        RunStarted("human", "other", 2.0),
        ToolWaiting("human", "interrupt", 0, 3.0),
        RunStarted("new", "other", 3.0),
        CallStarted("ended", "coder", 1, "c", 3.0),
        RunEnded("ended", "completed", 4.0),
    )
    runs = watched.view.snapshot(5.0, limit=10)["runs"]
    assert [(row["run_id"], row["state"], row["forecast"]) for row in runs["rows"]] == [
        ("tool", "tool", None),
        ("human", "human", None),
        ("new", "idle", None),
    ]
    assert (runs["states"], runs["workflows"]) == ({"tool": 1, "human": 1, "idle": 1}, {"swe": 1, "other": 2})


def test_thousands_of_runs_are_counted_and_the_oldest_are_listed() -> None:
    watched = Watched(forecasts=100)
    runs = [(f"r{number}", float(number)) for number in range(3_000)]
    watched.hear(*(RunStarted(run, "swe", at_s) for run, at_s in runs))
    watched.hear(*(CallStarted(run, "coder", 1, "c", 9e3) for run, _ in runs))
    snapshot = watched.view.snapshot(9_001.0, limit=50)
    assert (snapshot["runs"]["active"], snapshot["runs"]["states"]) == (3_000, {"calling": 3_000})
    assert [row["run_id"] for row in snapshot["runs"]["rows"]] == [f"r{number}" for number in range(50)]
    assert len(json.dumps(snapshot)) < 30_000
    assert len(watched.view._forecasts) == 100


def test_a_pool_is_divided_into_runs_retired_and_free() -> None:
    watched = Watched(pieces=2)
    held = {"r1": (300, 0), "r2": (200, 50), "r3": (100, 0)}  # 600 tokens for 300 that are used: much is shared
    watched.hear(ReplicaJoined("a", "e1", 1.0), Residency("a", "e1", 2.0, held, 40))
    pools = {"state": 1, "device_pool": 1_000, "device_free": 500, "device_retired": 200}
    watched.view.reported("a", "e1", pools)
    watched.view.reported("gone", "e", pools)
    (replica,) = watched.view.snapshot(3.0, limit=10)["replicas"]
    assert {
        name: replica[name] for name in ("replica", "state", "runs", "queued_prefill_tokens", "device", "host")
    } == {
        "replica": "a",
        "state": "DEGRADED",
        "runs": 3,
        "queued_prefill_tokens": 40,
        "device": {
            "pool": 1_000,
            "free": 500,
            "retired": 200,
            "used": 300,
            "pieces": [("r1", 150), ("r2", 100)],
        },
        "host": None,  # it said nothing of a host tier
    }


def test_an_engine_that_starts_anew_is_not_credited_with_the_pools_of_the_one_before() -> None:
    watched = Watched()
    watched.hear(ReplicaJoined("a", "e1", 1.0))
    watched.view.reported("a", "e1", {"device_pool": 1_000, "device_free": 0})
    watched.hear(ReplicaJoined("a", "e2", 2.0))
    (replica,) = watched.view.snapshot(3.0, limit=10)["replicas"]
    assert (replica["device"], replica["state"]) == (None, None)


def test_rates_are_what_happened_between_samples_and_none_where_nobody_reports() -> None:
    watched = Watched(samples=2, sample_s=5)  # type: ignore[arg-type]

    def call(number: int, prompt: int, device: int) -> None:
        watched.hear(CallFinished("r1", "coder", number, f"c{number}", 1.0, "stop", prompt, 1, device))

    watched.view.tick(0.0)
    call(1, 100, 0)
    watched.view.reported("a", "e1", {"prefetch_useful": 10, "prefetch_late": 0})  # of before this controller
    assert watched.view._totals == {"prefetch_useful": 0, "prefetch_late": 0}
    watched.view.tick(4.0)  # not due
    watched.view.tick(5.0)
    call(2, 200, 150)
    watched.view.reported("a", "e1", {"prefetch_useful": 30, "prefetch_late": 0})
    watched.view.tick(10.0)
    watched.view.reported("a", "e2", {"prefetch_useful": 4, "prefetch_late": 0})  # it has started anew
    watched.view.tick(15.0)
    rates = watched.view.snapshot(16.0, limit=0)["rates"]
    assert rates == {
        **dict.fromkeys(TOTALS),
        "at_s": [10.0, 15.0],
        "every_s": 5,
        "calls_finished": [1, 0],
        "prompt_tokens": [200, 0],
        "device_cached_tokens": [150, 0],
        "host_cached_tokens": [0, 0],
        "prefetch_useful": [20, 4],
        "prefetch_late": [0, 0],
    }

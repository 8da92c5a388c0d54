"""The routing table follows the controller's events."""

from pbkv_ray.config import ControllerOptions
from pbkv_ray.core.controller import Controller
from pbkv_ray.core.events import (
    CallFinished,
    ReplicaJoined,
    ReplicaLeft,
    Residency,
    RunEnded,
    RunStarted,
    Tick,
)
from pbkv_ray.core.placing import Placing
from pbkv_ray.core.routing import Held
from pbkv_ray.predict.counts import VariableOrderCounts


def make(**options: int) -> tuple[Controller, Placing]:
    controller = Controller(ControllerOptions(**options), VariableOrderCounts())
    return controller, Placing(controller)


def test_a_run_from_its_first_call_to_its_end():
    controller, placing = make()
    controller.handle(ReplicaJoined("a", "epoch-1", 0.0), ReplicaJoined("b", "epoch-1", 0.0))
    controller.handle(RunStarted("child", "swe", 1.0, parent_run_id="lead"))
    placed = placing.place("child", 2_000, 1.0, ["a", "b"])
    assert placed is not None
    decision, place = placed
    assert (decision.replica, decision.reason) == ("a", "placed")
    assert place is not None
    assert (place.home, place.parent) == ("a", "lead")
    controller.handle(Residency("a", "epoch-1", 2.0, {"child": (1_900, 100)}, 700, 5_000.0))
    controller.handle(*(CallFinished("child", "coder", 1, f"c{n}", 3.0, "stop", 2_000, 9, 1_500) for n in range(3)))
    place = placing.routes.get("child")
    assert place is not None
    assert (place.held, place.recent, place.calls) == ({"a": Held(1_900, 100)}, (500, 500), 3)
    news = placing.routes.replicas["a"].news
    assert (news.queued_tokens, news.prefill_tokens_s) == (700, 5_000.0)

    actions = controller.handle(RunEnded("child", "completed", 4.0))
    placing.performed(actions)
    assert "child" not in placing.routes
    assert placing.place("child", 2_000, 5.0, ["a", "b"]) is None  # it has ended


def test_a_run_whose_lease_ran_out_has_no_home():
    controller, placing = make(lease_s=10)
    controller.handle(ReplicaJoined("a", "e", 0.0), RunStarted("r", "swe", 0.0))
    placing.place("r", 100, 1.0, ["a"])
    placing.performed(controller.handle(Tick(20.0)))
    assert "r" not in placing.routes


def test_reports_of_an_engine_that_is_no_more_are_not_believed():
    controller, placing = make()
    controller.handle(RunStarted("r", "swe", 0.0), ReplicaJoined("a", "epoch-2", 0.0))
    controller.handle(Residency("a", "epoch-1", 1.0, {"r": (500, 0)}))
    assert placing.routes.get("r").held == {}  # type: ignore[union-attr]
    controller.handle(Residency("a", "epoch-2", 1.0, {"r": (400, 0)}))
    assert placing.routes.get("r").held == {"a": Held(400)}  # type: ignore[union-attr]
    controller.handle(ReplicaLeft("a", 2.0))
    assert placing.routes.get("r").held == {}  # type: ignore[union-attr]


def test_ids_that_are_none_get_no_place():
    controller, placing = make()
    controller.handle(ReplicaJoined("a", "e", 0.0))
    assert [placing.place(run, 1, 1.0, ["a"]) for run in ("", "x" * 300)] == [None, None]

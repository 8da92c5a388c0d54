"""Conservative prefetch: what is loaded, in what order, within which budget, and what became of it."""

import numpy as np
import pytest

from pbkv_ray.core.forecast import Forecast
from pbkv_ray.core.prefetch import Load, Prefetcher, PrefetchOptions
from pbkv_ray.core.reuse import ReuseIndex, Tier
from pbkv_ray.core.scores import PaperScore
from pbkv_ray.errors import ConfigError

BOTH, DEVICE_ONLY, HOST_ONLY = (True, True), (True, False), (False, True)


class Engine:
    """An index of named nodes, and a prefetcher that has measured 100 tokens a step."""

    def __init__(self, options: PrefetchOptions | None = None) -> None:
        self.index = ReuseIndex[str](PaperScore())
        self.prefetcher = Prefetcher(self.index, options or PrefetchOptions(burst_steps=1))
        self.prefetcher.decoded(0.01)
        self.prefetcher.transferred(10_000, 1.0)
        self.version = 0

    def node(
        self, name: str, run: str, tokens: int, held: tuple[bool, bool] = HOST_ONLY, parent: str | None = None
    ) -> None:
        self.index.add(name, tokens, parent)
        self.hold(name, held)
        self.index.use(name, run, "code")

    def hold(self, name: str, held: tuple[bool, bool]) -> None:
        for tier, resident in zip(Tier, held, strict=True):
            self.index.set_tier(name, tier, resident=resident, evictable=False)

    def expect(self, run: str, probability: float) -> None:
        self.version += 1
        step = np.array([[probability, 1 - probability]])
        self.index.update(run, Forecast(("code",), step), version=self.version, at_s=0.0)

    def plan(self, free: int = 10_000, pool: int = 100_000) -> list[Load[str]]:
        loads = self.prefetcher.plan(free, pool)
        self.prefetcher.check_invariants()
        return loads

    def paths(self, free: int = 10_000) -> list[tuple[str, ...]]:
        return [load.path for load in self.plan(free)]


def test_the_likeliest_comes_first() -> None:
    engine = Engine()
    for run, probability in (("w1", 0.3), ("w2", 0.9), ("w3", 0.6), ("w4", 0.01)):
        engine.node(f"{run} context", run, 20)
        engine.expect(run, probability)
    loads = engine.plan()
    assert loads == [
        Load("w2 context", ("w2 context",), 20, pytest.approx(0.9)),
        Load("w3 context", ("w3 context",), 20, pytest.approx(0.6)),
        Load("w1 context", ("w1 context",), 20, pytest.approx(0.3)),
    ]  # a hundredth is not worth a transfer


def test_one_step_counts_and_no_more() -> None:
    engine = Engine()
    engine.node("needed in two steps", "w1", 20)
    step = np.array([[0.0, 1.0, 0.0], [1.0, 0.0, 0.0]])
    engine.index.update("w1", Forecast(("code", "plan"), step), version=1, at_s=0.0)
    assert engine.index.explain("needed in two steps").key[1] == pytest.approx(0.7)  # type: ignore[union-attr]
    assert engine.paths() == []


def test_ancestors_first_and_the_longest_prefix_that_fits() -> None:
    engine = Engine()
    engine.node("system", "w1", 50, DEVICE_ONLY)
    engine.node("turn 1", "w1", 60, parent="system")
    engine.node("turn 2", "w1", 30, parent="turn 1")
    engine.node("turn 3", "w1", 30, parent="turn 2")
    engine.expect("w1", 1.0)
    assert engine.index.load_path("turn 3") == [("turn 1", 60), ("turn 2", 30), ("turn 3", 30)]
    assert engine.paths() == [("turn 1",), ("turn 2",)]  # 100 tokens a step
    for name in ("turn 1", "turn 2"):
        engine.prefetcher.arrived(name)
        engine.hold(name, BOTH)
    assert engine.paths() == [("turn 3",)]


def test_a_path_with_a_hole_cannot_be_loaded() -> None:
    engine = Engine()
    engine.node("gone", "w1", 10, (False, False))
    engine.node("below", "w1", 10, parent="gone")
    engine.expect("w1", 1.0)
    assert engine.index.load_path("below") == []
    assert engine.paths() == []


def test_space_is_free_plus_retired_and_never_an_active_node() -> None:
    engine = Engine()
    engine.node("wanted", "w1", 40)
    engine.node("active", "w2", 1_000, DEVICE_ONLY)
    engine.expect("w1", 1.0)
    assert engine.paths(free=39) == []
    engine.node("old", "w3", 30, DEVICE_ONLY)
    engine.index.end("w3")
    assert engine.paths(free=9) == []
    assert engine.paths(free=10) == [("wanted",)]


def test_what_is_on_the_way_takes_its_space_and_is_not_loaded_twice() -> None:
    engine = Engine()
    engine.node("first", "w1", 40)
    engine.node("below it", "w1", 10, parent="first")
    engine.node("second", "w2", 40)
    engine.expect("w1", 0.9)
    assert engine.paths(free=40) == [("first",)]
    engine.expect("w2", 0.8)
    assert engine.paths(free=79) == []
    assert engine.paths(free=80) == [("second",)]


def test_the_budget_is_what_a_decode_step_hides() -> None:
    engine = Engine()
    for i in range(6):
        engine.node(f"n{i}", "w1", 30)
    engine.expect("w1", 1.0)
    assert [load.tokens for load in engine.plan()] == [30, 30, 30]
    assert engine.prefetcher.step_tokens() == pytest.approx(100)
    engine.prefetcher.decoded(0.005)
    assert engine.prefetcher.step_tokens() == pytest.approx(95)  # a running average


def test_before_anything_was_measured_it_only_probes() -> None:
    prefetcher = Prefetcher(ReuseIndex[str](PaperScore()), PrefetchOptions(first_tokens=64))
    assert prefetcher.step_tokens() == 64
    prefetcher.transferred(0, 0.0)
    assert prefetcher.step_tokens() == 64


def test_unused_bandwidth_adds_up_to_a_long_node() -> None:
    engine = Engine(PrefetchOptions(burst_steps=8))
    engine.node("long", "w1", 350)
    engine.expect("w1", 1.0)
    assert [len(engine.plan()) for _ in range(4)] == [0, 0, 0, 1]
    for _ in range(20):
        engine.plan()
    engine.node("too long", "w1", 801)
    assert engine.plan() == []


def test_the_aggressive_variant_displaces_a_share_of_the_pool() -> None:
    engine = Engine(PrefetchOptions(burst_steps=1, aggressive=0.1))
    engine.node("wanted", "w1", 40)
    engine.expect("w1", 1.0)
    assert engine.plan(free=0, pool=399) == []
    assert [load.node for load in engine.plan(free=0, pool=400)] == ["wanted"]


def test_loads_of_a_run_that_moved_elsewhere_are_cancelled() -> None:
    engine = Engine()
    for run in ("w1", "w2", "w3"):
        engine.node(f"{run} context", run, 20)
        engine.expect(run, 0.9)
    loads = engine.plan()
    engine.expect("w1", 0.0)
    engine.index.end("w3")
    gone = engine.prefetcher.to_cancel(loads)
    assert sorted(load.node for load in gone) == ["w1 context", "w3 context"]
    for load in gone:
        engine.prefetcher.cancelled(load)
    engine.prefetcher.check_invariants()
    assert engine.prefetcher.count.cancelled == 40


def test_every_token_is_useful_late_wasted_cancelled_or_failed() -> None:
    engine = Engine()
    for i, name in enumerate(("useful", "late", "wasted", "failed")):
        engine.node(name, f"w{i}", 10 + i)
        engine.expect(f"w{i}", 0.9)
    loads = {load.node: load for load in engine.plan()}
    report = engine.prefetcher
    report.arrived("useful")
    report.used("useful")
    report.used("late")
    report.arrived("late")
    report.arrived("wasted")
    report.left("wasted")
    report.failed(loads["failed"])
    for nothing in (report.used, report.left, report.arrived):
        nothing("useful")
        nothing("unknown")
    report.check_invariants()
    count = report.count
    assert (count.planned, count.useful, count.late, count.wasted, count.failed) == (46, 10, 11, 12, 13)


def test_the_fate_of_too_many_is_given_up_and_counted() -> None:
    engine = Engine(PrefetchOptions(burst_steps=1, max_tracked=3))
    for i in range(5):
        engine.node(f"n{i}", "w1", 10)
    engine.expect("w1", 1.0)
    assert len(engine.plan()) == 5
    assert (engine.prefetcher.count.forgotten, engine.prefetcher.count.wasted) == (20, 20)


@pytest.mark.parametrize("wrong", [{"aggressive": 1.0}, {"smoothing": 0.0}, {"burst_steps": 0.5}])
def test_wrong_settings_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        PrefetchOptions(**wrong)  # type: ignore[arg-type]

"""Routers against each other on simulated replicas: small, but SGLang's own cache objects behind each."""

import pytest

from pbkv_ray.errors import ConfigError
from pbkv_ray.replay.arrivals import ToolWaits
from pbkv_ray.replay.bench_routing import RoutingSetup, compare, simulate
from pbkv_ray.replay.cost import load_cost
from pbkv_ray.replay.routers import Asks, ConsistentHash, Ours, PowerOfTwo, PrefixAffinity, parse_routers
from pbkv_ray.replay.workload import TraceCall, TraceRun, Workload

BLOCK = 16


def run(number: int, calls: int = 4, blocks: int = 40) -> TraceRun:
    """A conversation: every call extends the prompt of the one before by eight blocks."""
    first = 1_000 * (number + 1)
    made = (TraceCall("a", 0, BLOCK * (blocks + 8 * n), 8, ((first, blocks + 8 * n),)) for n in range(calls))
    return TraceRun(f"run-{number}", f"task-{number}", "chat", tuple(made))


@pytest.fixture
def setup() -> RoutingSetup:
    workload = Workload("chats", tuple(run(number) for number in range(12)))
    return RoutingSetup(workload, 2, 1.5, "pbkv+", load_cost("qwen3-14b/a6000"), waits=ToolWaits(0.2, 0.4))


def test_a_cluster_answers_every_call_and_ours_keeps_runs_at_home(setup: RoutingSetup) -> None:
    result = compare(["pbkv", "pow2"], [3], setup, lambda text: None)
    ours, two = (result["replicas"]["3"]["routers"][name] for name in ("pbkv", "pow2"))
    assert (ours["replicas_per_run"], ours["imbalance"]) == (1.0, 1.0)
    assert two["replicas_per_run"] > 1.5
    assert ours["device_hit"] > 1.5 * two["device_hit"]
    assert ours["run_seconds"]["mean"] < two["run_seconds"]["mean"]
    assert result["setup"]["calls"] == 48


def test_the_same_cluster_twice_gives_the_same_figures(setup: RoutingSetup) -> None:
    first, second = (simulate("pbkv", 2, setup) for _ in range(2))
    assert first | {"cpu_seconds": 0} == second | {"cpu_seconds": 0}


def ask(run_id: str, *prompt: int, at_s: float = 0.0) -> Asks:
    return Asks(run_id, None, prompt, 1_000, at_s)


def test_the_rivals_do_what_they_are_known_for() -> None:
    hashing = ConsistentHash(3, 0)
    homes = {n: {hashing.choose(ask(f"r{n}"), [9, 0, 0]) for _ in range(3)} for n in range(30)}
    assert all(len(home) == 1 for home in homes.values())
    assert set.union(*homes.values()) == {0, 1, 2}
    assert {PowerOfTwo(2, seed).choose(ask("r"), [5, 1]) for seed in range(9)} == {1}
    prefix = PrefixAffinity(2, 0)
    assert [prefix.choose(ask("r", 1, 2, 3), [0, 0]), prefix.choose(ask("s", 7, 8, 9), [0, 0])] == [0, 1]
    assert prefix.choose(ask("t", 1, 2, 3, 4), [50, 0]) == 0  # affinity at any price
    assert PrefixAffinity(2, 0, threshold=10).choose(ask("t", 1, 2, 3, 4), [50, 0]) == 1


def test_ours_follows_reports() -> None:
    from pbkv_ray.replay.routers import Report

    ours = Ours(2, 0)
    assert ours.choose(ask("r"), [0, 0]) == 0
    ours.report(0, Report({"r": (1_000, 0)}, 90_000, 4_000.0, 1e6), 20.0)
    assert ours.choose(ask("r", at_s=20.0), [0, 0]) == 1


def test_unknown_routers_are_refused() -> None:
    with pytest.raises(ConfigError, match="known are pbkv, pow2"):
        parse_routers("pbkv,random")

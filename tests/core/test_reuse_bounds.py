"""ReuseIndex within its bounds, and the same on every rank: what is many, old, late or empty."""

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from pbkv_ray.core.owners import OwnersOptions
from pbkv_ray.core.scores import PaperScore, RecencyScore, Score, TimeScore
from tests.core.reuse_kit import DEVICE, Tree, surely

ROOT = Path(__file__).parents[2]


def test_beyond_the_cap_a_node_is_popular_and_keeps_an_upper_estimate() -> None:
    tree = Tree(options=OwnersOptions(max_owners=2))
    tree.leaf("two owners", ("w1", "plan"), ("w2", "plan"))
    tree.leaf("popular", *((f"w{i}", "plan") for i in range(4)))
    for i in range(4):
        tree.expect(f"w{i}", surely("plan"))
    explained = tree.index.explain("popular")
    assert explained is not None
    assert (explained.popular, explained.owners, explained.key[1]) == (True, (), pytest.approx(4.0))
    assert tree.order() == ["two owners", "popular"]
    for i in range(3):
        tree.index.end(f"w{i}")
    assert tree.order() == ["two owners", "popular"]
    assert tree.index.explain("popular").key[:2] == (1, pytest.approx(1.0))  # type: ignore[union-attr]
    tree.index.end("w3")
    assert tree.order() == ["two owners", "popular"]
    assert tree.index.retired_tokens(DEVICE) == 2
    tree.index.use("two owners", "w9", "plan")
    tree.expect("w9", surely("plan"))
    assert tree.order() == ["popular", "two owners"]  # 1.0 both: recency decides


def test_a_popular_node_is_worth_what_its_workflows_runs_are() -> None:
    tree = Tree(options=OwnersOptions(max_owners=1))
    tree.leaf("popular")
    tree.expect("w1", surely("plan"))  # a hint came before the run's first call: its workflow is not known yet
    for run in ("w1", "w2"):
        tree.index.use("popular", run, "plan", workflow="swe")
        tree.expect(run, surely("plan"))
    tree.index.use("popular", "w3", "plan", workflow="swe")
    tree.index.call("other", "plan", workflow="hover")
    tree.expect("other", surely("plan"))
    assert tree.index.explain("popular").key[:2] == (1, pytest.approx(2.0))  # type: ignore[union-attr]
    tree.index.use("popular", "other", "plan", workflow="hover")
    assert tree.index.explain("popular").key[:2] == (1, pytest.approx(3.0))  # type: ignore[union-attr]
    for run in ("w1", "w2", "w3", "other"):
        tree.index.end(run)
    assert tree.index.reason("popular") == "retired"
    tree.index.check_invariants()


def test_the_longest_silent_run_is_given_up_when_the_table_is_full() -> None:
    tree = Tree(options=OwnersOptions(max_runs=2))
    for run in ("w1", "w2", "w1", "w3"):
        tree.leaf(f"{run} {len(tree.index)}", (run, "plan"))
    assert list(tree.index.owners.runs) == ["w1", "w3"]
    assert tree.index.owners.count.expired_runs == 1
    assert tree.order()[0] == "w2 1"


def test_ended_runs_are_forgotten_after_a_while() -> None:
    tree = Tree(options=OwnersOptions(ended_memory_s=10.0, max_ended=3))
    for i in range(5):
        tree.index.end(f"w{i}", at_s=1.0)
    assert [tree.index.owners.has_ended(f"w{i}") for i in range(5)] == [False, False, True, True, True]
    tree.index.tick(11.0)
    assert not any(tree.index.owners.has_ended(f"w{i}") for i in range(5))


def test_a_forecast_ages_out_and_recency_is_left() -> None:
    tree = Tree(options=OwnersOptions(max_age_s=60.0))
    tree.leaf("expected", ("w1", "plan"))
    tree.leaf("unknown", ("w2", "plan"))
    tree.expect("w1", surely("plan"), at_s=100.0)
    assert tree.order() == ["unknown", "expected"]
    tree.index.tick(159.9)
    assert tree.order() == ["unknown", "expected"]
    tree.index.tick(160.0)
    assert tree.order() == ["expected", "unknown"]


def test_agents_beyond_the_bound_share_one_bit() -> None:
    tree = Tree(options=OwnersOptions(max_agents=3))
    for i in range(5):
        tree.leaf(f"n{i}", ("w1", f"agent {i}"))
    tree.expect("w1", surely("agent 4"))
    assert tree.order() == ["n0", "n1", "n2", "n3", "n4"]
    keys = [tree.index.explain(f"n{i}").key[1] for i in range(5)]  # type: ignore[union-attr]
    assert keys == [0.0, 0.0, 1.0, 1.0, 1.0]


def test_clear_forgets_nodes_and_keeps_what_was_learned() -> None:
    tree = Tree()
    tree.leaf("a", ("w1", "plan"))
    tree.expect("w1", surely("plan"))
    tree.index.clear()
    assert (len(tree.index), tree.order(), list(tree.index.owners.runs)) == (0, [], ["w1"])
    tree.leaf("a", ("w1", "plan"))
    assert tree.index.explain("a").key[1] == pytest.approx(1.0)  # type: ignore[union-attr]


def played(score: Score, seed: int = 1) -> list[str]:
    """One log of random events on a fresh index; the victims, in order."""
    rng = random.Random(seed)
    tree = Tree(score, OwnersOptions(max_owners=4))
    alive: list[str] = []
    evicted: list[str] = []
    for i in range(300):
        run, agent = f"w{rng.randrange(9)}", rng.choice(("plan", "code", "test"))
        tree.leaf(f"n{i}", (run, agent), parent=rng.choice(alive) if alive and i % 2 else None)
        alive.append(f"n{i}")
        tree.index.call(run, agent, at_s=i * 0.7, blocks=range(i % 5, i % 7))
        tree.expect(run, surely(rng.choice(("plan", "code")), then=rng.choice(("test", None))), at_s=i * 0.7)
        if rng.random() < 0.1:
            tree.index.end(f"w{rng.randrange(9)}")
        if len(alive) > 40:
            walk = tree.index.victims(DEVICE)
            for victim, _ in zip(walk, range(5), strict=False):
                tree.index.set_tier(victim, DEVICE, resident=False, evictable=False)
                tree.index.remove(victim)
                alive.remove(victim)
                evicted.append(victim)
            walk.close()
    tree.index.check_invariants()
    return evicted


@pytest.mark.parametrize("score", [PaperScore, TimeScore, RecencyScore])
def test_two_ranks_that_saw_the_same_log_choose_the_same_victims(score: type[Score]) -> None:
    """In another process, with other string hashes: nothing may depend on the order of a set of strings."""
    name = score.__name__
    code = f"from tests.core.test_reuse_bounds import *; print(*played({name}()), sep=',')"
    environment = {**os.environ, "PYTHONHASHSEED": "77"}
    other = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    victims = played(score())
    assert len(victims) > 200
    assert other.stdout.strip().split(",") == victims


def test_a_day_of_short_runs_leaves_nothing_behind() -> None:
    """Foreign traffic, crashed runs that never end, late calls: tables stay within their bounds."""
    rng = random.Random(0)
    options = OwnersOptions(max_runs=50, max_ended=100, ended_memory_s=30.0)
    tree = Tree(TimeScore(), options)
    alive: list[str] = []
    for i in range(2_000):
        name, run = f"n{i}", f"w{rng.randrange(i // 20 + 1)}" if rng.random() < 0.9 else None
        tree.leaf(name, (run, rng.choice(("plan", "code"))) if run else None)
        if run:
            tree.index.call(run, "plan", blocks=[i, i + 1, i + 2], at_s=float(i))
            tree.expect(run, surely("plan"), at_s=float(i))
        alive.append(name)
        if rng.random() < 0.03 and run:
            tree.index.end(run)
        if len(alive) > 60:
            walk = tree.index.victims(DEVICE)
            victim = next(walk)
            tree.index.set_tier(victim, DEVICE, resident=False, evictable=False)
            tree.index.remove(victim)
            walk.close()
            alive.remove(victim)
    tree.index.check_invariants()
    owners = tree.index.owners
    assert len(owners.runs) <= 50
    assert owners.size <= 61
    assert len(owners.learned._runs) <= 50
    assert len(owners.worth._weights) <= 1_024

"""ReuseIndex, told as stories: what goes first, and why."""

import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from pbkv_ray.core.forecast import Forecast
from pbkv_ray.core.owners import OwnersOptions
from pbkv_ray.core.reuse import ReuseIndex, Tier
from pbkv_ray.core.scores import PaperScore, RecencyScore, Score, TimeScore
from pbkv_ray.errors import ConfigError, InputError

ROOT = Path(__file__).parents[2]
DEVICE, HOST = Tier.DEVICE, Tier.HOST


def surely(agent: str, then: str | None = None) -> Forecast:
    """The next call is by `agent`, the one after it by `then`; None ends the run."""
    names = tuple(dict.fromkeys(name for name in (agent, then) if name))
    step = np.zeros((2, len(names) + 1))
    step[0, names.index(agent)] = 1.0
    step[1, names.index(then) if then else -1] = 1.0
    return Forecast(names, step)


class Tree:
    """Leaves that hang under a root, one token each, by name; used as they are made."""

    def __init__(self, score: Score | None = None, options: OwnersOptions | None = None) -> None:
        self.index = ReuseIndex[str](score or PaperScore(), options)
        self.version = 0

    def leaf(self, name: str, *users: tuple[str, str] | None, parent: str | None = None) -> None:
        """Users are (run, agent), None is foreign traffic."""
        self.index.add(name, 1, parent)
        if parent is not None:
            self.index.set_tier(parent, DEVICE, resident=True, evictable=False)
        self.index.set_tier(name, DEVICE, resident=True, evictable=True)
        for user in users:
            self.index.use(name, *(user or (None,)))

    def expect(self, run: str, forecast: Forecast, at_s: float = 0.0) -> None:
        self.version += 1
        self.index.update(run, forecast, version=self.version, at_s=at_s)

    def order(self, tier: Tier = DEVICE) -> list[str]:
        """All evictable leaves, first victim first; nothing is evicted."""
        walk = self.index.victims(tier)
        names = list(walk)
        walk.close()
        self.index.check_invariants()
        return names


def test_without_forecasts_and_endings_the_longest_unused_goes_first() -> None:
    tree = Tree()
    for name in "abcd":
        tree.leaf(name, ("run " + name, "plan"))
    tree.leaf("e")  # nobody's
    tree.leaf("f", None)
    tree.index.use("b", "run b", "code")
    tree.index.touch("a")
    assert tree.order() == ["c", "d", "e", "f", "b", "a"]


def test_retired_go_before_active_and_private_before_shared() -> None:
    tree = Tree()
    tree.leaf("active, used long ago", ("w1", "plan"))
    tree.leaf("shared by two ended runs", ("w2", "plan"), ("w3", "plan"))
    tree.leaf("private of an ended run", ("w2", "code"))
    tree.leaf("shared with an active run", ("w2", "plan"), ("w1", "plan"))
    tree.index.end("w2")
    tree.index.end("w3")
    assert tree.order() == [
        "private of an ended run",
        "shared by two ended runs",
        "active, used long ago",
        "shared with an active run",
    ]
    assert tree.index.retired_tokens(DEVICE) == 2
    assert [tree.index.reason(name) for name in tree.order()] == ["retired", "retired", "recency", "recency"]


def test_active_go_by_ascending_score_then_recency() -> None:
    tree = Tree()
    tree.leaf("coder's", ("w1", "code"))
    tree.leaf("tester's", ("w1", "test"))
    tree.leaf("both", ("w1", "code"), ("w1", "test"))
    tree.leaf("planner's", ("w1", "plan"))
    tree.leaf("foreign", None)
    tree.expect("w1", surely("code", then="test"))
    # Paper Eq. 2 with gamma 0.7: code 1, test 0.7, plan 0; foreign traffic competes at zero by recency.
    assert tree.order() == ["planner's", "foreign", "tester's", "coder's", "both"]
    explained = tree.index.explain("both")
    assert explained is not None
    assert explained.key[:2] == (1, pytest.approx(1.7))
    assert (explained.reason, explained.owners) == ("scored", (("w1", ("code", "test")),))


def test_scores_add_up_over_runs() -> None:
    """Paper section 4.1: a sum, not KVFlow's minimum, so that nodes of many runs rise."""
    tree = Tree()
    tree.leaf("one run, certain", ("w1", "code"))
    tree.leaf("two runs, likely", ("w2", "code"), ("w3", "code"))
    tree.expect("w1", surely("code"))
    for run in ("w2", "w3"):
        tree.expect(run, Forecast(("code",), np.array([[0.6, 0.4]])))
    assert tree.order() == ["one run, certain", "two runs, likely"]


def test_a_parent_becomes_a_leaf_within_the_pass() -> None:
    tree = Tree()
    tree.leaf("root", ("w1", "plan"))
    tree.leaf("leaf", ("w1", "plan"), parent="root")
    tree.leaf("other", ("w2", "plan"))
    assert tree.order() == ["leaf", "other"]
    walk = tree.index.victims(DEVICE)
    assert next(walk) == "leaf"
    tree.index.set_tier("leaf", DEVICE, resident=False, evictable=False)
    tree.index.remove("leaf")
    tree.index.set_tier("root", DEVICE, resident=True, evictable=True)
    assert list(walk) == ["root", "other"]


def test_what_could_not_be_evicted_comes_once_a_pass_and_stays_in_the_order() -> None:
    tree = Tree()
    for name in "ab":
        tree.leaf(name, ("w1", "plan"))
    for _ in range(2):
        walk = tree.index.victims(DEVICE)
        assert [next(walk, None) for _ in range(3)] == ["a", "b", None]
        walk.close()
    assert tree.index.peek(DEVICE) == "a"
    assert sum(tree.index.count.evictions.values()) == 0


def test_a_node_locked_while_it_is_offered_is_not_back_in_the_order() -> None:
    tree = Tree()
    tree.leaf("a", ("w1", "plan"))
    walk = tree.index.victims(DEVICE)
    next(walk)
    tree.index.set_tier("a", DEVICE, resident=True, evictable=False)
    walk.close()
    assert tree.order() == []


def test_both_halves_of_a_split_keep_the_owners() -> None:
    tree = Tree()
    tree.index.add("node", 10)
    tree.index.set_tier("node", DEVICE, resident=True, evictable=True)
    tree.index.use("node", "w1", "plan")
    tree.index.split("node", "upper", 4)
    tree.leaf("sibling", ("w2", "code"), parent="upper")
    assert tree.index.load_path("node") == []  # the device holds it
    owners = {name: tree.index.explain(name).owners for name in ("node", "upper", "sibling")}  # type: ignore[union-attr]
    assert owners == {
        "node": (("w1", ("plan",)),),
        "upper": (("w1", ("plan",)), ("w2", ("code",))),
        "sibling": (("w2", ("code",)),),
    }
    assert tree.index.residency() == {"w1": (10, 0), "w2": (5, 0)}


def test_a_run_that_ends_retires_without_a_visit_to_its_nodes() -> None:
    tree = Tree()
    tree.leaf("kept", ("w2", "plan"))
    for i in range(100):
        tree.leaf(f"n{i}", ("w1", "plan"))
    tree.expect("w1", surely("plan"))
    assert tree.order()[0] == "kept"
    sets = tree.index.owners.size
    tree.index.end("w1")
    assert tree.index.owners.size <= sets
    assert tree.order()[-1] == "kept"


def test_late_and_repeated_news_change_nothing() -> None:
    tree = Tree()
    tree.leaf("a", ("w1", "plan"))
    tree.leaf("b", ("w2", "plan"))
    tree.index.end("w1")
    tree.index.end("w1")
    tree.index.end("never heard of")
    tree.index.call("w1", "plan")
    tree.expect("w1", surely("plan"))
    tree.index.use("b", "w1", "plan")
    tree.index.use("unknown node", "w2", "plan")
    tree.index.update("w2", surely("plan"), version=7, at_s=0.0)
    tree.index.update("w2", surely("code"), version=6, at_s=0.0)
    assert tree.order() == ["a", "b"]
    assert list(tree.index.owners.runs) == ["w2"]
    assert tree.index.explain("b").owners == (("w2", ("plan",)),)  # type: ignore[union-attr]
    count = tree.index.owners.count
    assert (count.double_ends, count.unknown_ends, count.late_calls) == (1, 1, 2)
    assert (count.late_forecasts, count.old_versions, tree.index.count.unknown_nodes) == (1, 1, 1)


def test_tokens_that_come_after_the_end_of_their_run_are_retired_at_once() -> None:
    """Or the last output of a cancelled run would outlive its prompt, and lock it in as its child."""
    tree = Tree()
    tree.leaf("old, active", ("w2", "plan"))
    tree.leaf("prompt", ("w1", "plan"))
    tree.index.end("w1")
    tree.leaf("late output", ("w1", "plan"), parent="prompt")
    assert tree.order() == ["late output", "old, active"]


def test_foreign_traffic_revives_a_retired_node() -> None:
    tree = Tree()
    tree.leaf("system prompt", ("w1", "plan"))
    tree.leaf("other", ("w1", "plan"))
    tree.leaf("active", ("w2", "plan"))
    tree.index.end("w1")
    tree.index.use("system prompt", None)
    assert tree.order() == ["other", "active", "system prompt"]


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


def test_each_tier_has_its_own_leaves() -> None:
    tree = Tree()
    tree.leaf("a", ("w1", "plan"))
    tree.leaf("b", ("w1", "plan"))
    tree.index.set_tier("a", DEVICE, resident=False, evictable=False)
    tree.index.set_tier("a", HOST, resident=True, evictable=True)
    assert (tree.order(DEVICE), tree.order(HOST)) == (["b"], ["a"])
    assert tree.index.residency() == {"w1": (1, 1)}


def test_the_agents_latest_prompt_is_worth_more_than_what_it_left_behind() -> None:
    """HyperAgent's interns open a fresh context at each visit: the old one must not be protected."""
    tree = Tree(TimeScore())
    tree.leaf("system", ("w1", "intern"))
    tree.leaf("first visit", ("w1", "intern"), parent="system")
    tree.leaf("second visit", ("w1", "intern"), parent="system")
    tree.index.call("w1", "intern")
    tree.expect("w1", surely("intern"))
    assert tree.order() == ["first visit", "second visit"]


def test_the_tree_refuses_what_would_break_it() -> None:
    tree = Tree()
    tree.leaf("a")
    tree.leaf("b", parent="a")
    with pytest.raises(InputError, match="in the index already"):
        tree.index.add("a", 1)
    with pytest.raises(InputError, match="still has 1 children"):
        tree.index.remove("a")
    with pytest.raises(ConfigError, match="max_agents is 65"):
        OwnersOptions(max_agents=65)


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
    code = f"from tests.core.test_reuse import *; print(*played({name}()), sep=',')"
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

"""ReuseIndex, told as stories: what goes first, and why."""

import numpy as np
import pytest

from pbkv_ray.core.forecast import Forecast
from pbkv_ray.core.owners import OwnersOptions
from pbkv_ray.core.scores import TimeScore
from pbkv_ray.errors import ConfigError, InputError
from tests.core.reuse_kit import DEVICE, HOST, Tree, surely


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

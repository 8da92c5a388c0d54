"""Path features: followed step by step, the same in training and in service."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from pbkv_ray.predict.features import LENGTHS, PathFeatures, earlier, hidden, path_features, width

AGENTS = ("a", "b", "c")


def follow(path: str) -> PathFeatures:
    made = PathFeatures(AGENTS)
    for agent in path:
        made.push(agent)
    return made


@settings(deadline=None)
@given(st.text("abcx", max_size=30))
def test_vectors_have_their_width_and_say_how_often_each_agent_was_called(path: str) -> None:
    made = follow(path)
    assert made.vector().shape == (width(3),)
    assert np.isfinite(made.vector()).all()
    before = [path[:-1].count(agent) for agent in AGENTS] + [path[:-1].count("x")]
    assert earlier([made]).tolist() == [before]
    assert made.calls == len(path)


@settings(deadline=None)
@given(st.text("abcx", min_size=1, max_size=20), st.text("abcx", min_size=1, max_size=5))
def test_a_copy_goes_its_own_way(path: str, more: str) -> None:
    made = follow(path)
    before = made.vector()
    twin = made.copy()
    for agent in more:
        twin.push(agent)
    assert (made.vector() == before).all()
    assert (twin.vector() == follow(path + more).vector()).all()


def test_tokens_may_come_later() -> None:
    at_once, later = follow("ab"), follow("ab")
    at_once.push("c", 100, 20)
    later.push("c")
    assert later.vector()[-LENGTHS:].tolist() == [0, 0, 0, 0]
    later.correct(100, 20)
    assert (later.vector() == at_once.vector()).all()
    np.testing.assert_allclose(at_once.vector()[-LENGTHS:], [1, np.log(101) / 8, 1, np.log(21) / 8], rtol=1e-6)
    assert (path_features(AGENTS, "abc", [1, 2, 100], [3, 4, 20])[2] == at_once.vector()).all()


def test_a_hidden_agent_looks_like_one_that_was_never_trained_on() -> None:
    stranger = PathFeatures(("a", "c"))
    for agent in "abbca":
        stranger.push(agent)
    known = follow("abbca").vector()[hidden(3, 1)]
    # Without b's slots (which are empty now) the two are the same numbers.
    assert sorted(known[known != 0].tolist()) == sorted(stranger.vector()[stranger.vector() != 0].tolist())

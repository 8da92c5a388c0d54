"""Path features: the same in training and in service, and against the same said slowly."""

from collections import Counter
from itertools import groupby

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from pbkv_ray.predict.features import LENGTHS, Paths, hidden, path_features, width

AGENTS = ("a", "b", "c")
PATHS = st.text("abcx", max_size=30)  # x: an agent that is not in the vocabulary


def follow(path: str, agents: tuple[str, ...] = AGENTS) -> Paths:
    return Paths.of(agents, [path])


def one_hot(size: int, slot: int) -> list[float]:
    return [float(i == slot) for i in range(size)]


def slowly(path: str) -> list[float]:
    """A vector over AGENTS, block by block."""
    columns = ["abcx".index(agent) for agent in path]
    stays = [(column, len(list(calls))) for column, calls in groupby(columns)]
    nothing = 4
    vector: list[float] = []
    for column in [*columns[::-1], *[nothing] * 6][:6]:
        vector += one_hot(5, column)
    newest = [*stays[::-1], *[(nothing, 0)] * 4]
    for column, calls in newest[:4]:
        vector += [*one_hot(5, column), np.log1p(calls), calls / 10]
    called, visited = Counter(columns), Counter(column for column, _ in stays)
    vector += [np.log1p(called[column]) for column in range(4)]
    vector += [np.log1p(visited[column]) for column in range(4)]
    vector += [np.log1p(columns[::-1].index(column)) if called[column] else 0.0 for column in range(4)]
    vector += [float(called[column] > 0) for column in range(4)]
    for number in (newest[0][1], visited[newest[0][0]], len(path)):
        vector += one_hot(13, min(number, 12))
    return [*vector, np.log1p(len(path)), len(path) / 50, len(stays) / 20, *[0.0] * LENGTHS]


@settings(deadline=None)
@given(st.lists(PATHS, min_size=1, max_size=5))
def test_each_path_of_a_batch_has_its_own_vector_and_its_earlier_calls(batch: list[str]) -> None:
    paths = Paths.of(AGENTS, batch)
    assert len(paths) == len(batch) and paths.vectors.shape == (len(batch), width(3))
    np.testing.assert_allclose(paths.vectors, [slowly(path) for path in batch], rtol=1e-6)
    assert paths.earlier.tolist() == [[path[:-1].count(agent) for agent in "abcx"] for path in batch]
    assert paths.current.tolist() == ["abcx".index((path or "x")[-1]) for path in batch]


@settings(deadline=None)
@given(PATHS)
def test_training_sees_at_each_call_what_service_saw_then(path: str) -> None:
    tokens = list(range(len(path)))
    trained = path_features(AGENTS, path, tokens, tokens)
    for call, vector in enumerate(trained.vectors):
        served = follow(path[: call + 1])
        served.tell(0, call, call)
        assert (served.vectors[0] == vector).all()


def test_tokens_may_come_later() -> None:
    paths = Paths.of(AGENTS, ["abc", "abc"])
    paths.tell(0, 100, None)
    assert paths.vectors[0, -LENGTHS:].tolist() == [1, np.float32(np.log(101) / 8), 0, 0]
    paths.tell(0, 100, 20)
    np.testing.assert_allclose(paths.vectors[0, -LENGTHS:], [1, np.log(101) / 8, 1, np.log(21) / 8], rtol=1e-6)
    assert paths.vectors[1, -LENGTHS:].tolist() == [0, 0, 0, 0], "another run's are not known"


def test_a_hidden_agent_looks_like_one_that_was_never_trained_on() -> None:
    stranger = follow("abbca", ("a", "c")).vectors[0]
    known = follow("abbca").vectors[0][hidden(3, 1)]
    # Without b's slots (which are empty now) the two are the same numbers.
    assert sorted(known[known != 0].tolist()) == sorted(stranger[stranger != 0].tolist())

"""How many runs are let in: from what runs hold, and from what thrash costs."""

import pytest

from pbkv_ray.core.admission import Admission, AdmissionOptions
from pbkv_ray.errors import ConfigError


def serve(
    rule: Admission,
    calls: int,
    again_s: float,
    in_flight: int,
    start_s: float = 0.0,
    every_s: float = 1.0,
    token_s: float = 0.001,
) -> float:
    for i in range(calls):
        rule.called(again_s, token_s, start_s + i * every_s, in_flight)
    return start_s + calls * every_s


def test_it_starts_with_the_runs_whose_mean_live_sets_fit() -> None:
    rule = Admission(100_000)
    assert rule.limit == 4
    rule.ended(20_000, 4, 4 * 1_000)
    assert rule.limit == 10  # half of 20,000 is what a run holds on average
    rule.ended(60_000, 4, 4 * 1_000)
    assert rule.limit == 5


def test_cheap_thrash_lets_more_in_one_at_a_time() -> None:
    rule = Admission(100_000)
    rule.ended(50_000, 4, 4 * 1_000)
    assert rule.limit == 4
    now_s = serve(rule, 4, 0.01, in_flight=4)
    assert rule.limit == 5
    serve(rule, 5, 0.01, in_flight=5, start_s=now_s)
    assert rule.limit == 6


def test_where_prompts_are_cheap_the_limit_grows_without_waiting() -> None:
    """There is a call a second; a run makes 40. From its start a prompt would take 0.05 s, 0.5 s or 2 s."""
    grown = []
    for token_s in (0.00005, 0.0005, 0.002):
        rule = Admission(100_000)
        rule.ended(50_000, 40, 40_000)
        for i in range(80):
            rule.called(0.0, token_s, float(i), in_flight=rule.limit)
        grown.append(rule.limit)
    assert grown == [83, 7, 5]


def test_what_prompts_cost_is_not_known_before_a_run_has_ended() -> None:
    rule = Admission(100_000)
    serve(rule, 10, 0.0, in_flight=4)
    assert rule.worst == 1.0
    rule.ended(50_000, 4, 4_000)
    assert rule.worst == pytest.approx(1.0, abs=0.3)  # a second for every prompt, and a prompt every second
    serve(rule, 200, 0.0, in_flight=4, start_s=10.0, token_s=0.0001)
    assert rule.worst == pytest.approx(0.1, abs=0.02)


def test_a_pause_does_not_make_prompts_look_cheap() -> None:
    rule = Admission(100_000)
    rule.ended(50_000, 4, 4_000)
    now_s = serve(rule, 100, 0.3, in_flight=4)
    before = rule.limit, rule.thrash, rule.worst
    serve(rule, 2, 0.3, in_flight=4, start_s=now_s + 600.0)
    assert rule.limit == before[0]
    assert rule.thrash > 0.25 * before[1] > 0
    assert rule.worst > 0.25 * before[2] > 0


def test_a_run_without_calls_teaches_nothing_that_could_hurt() -> None:
    rule = Admission(100_000)
    rule.ended(0, 0, 0)
    assert (rule.limit, rule.worst) == (4, 1.0)


def test_it_does_not_grow_while_there_is_room_for_runs_already() -> None:
    rule = Admission(100_000)
    serve(rule, 100, 0.0, in_flight=2)
    assert rule.limit == 4


def test_costly_thrash_holds_new_runs_back() -> None:
    rule = Admission(100_000)
    rule.ended(10_000, 4, 4 * 1_000)
    assert rule.limit == 20
    now_s = serve(rule, 12, 0.5, in_flight=12)
    assert rule.limit == 11  # from the runs that are there, not from what was allowed
    now_s = serve(rule, 200, 0.9, in_flight=11, start_s=now_s)
    assert rule.limit < 11
    serve(rule, 5_000, 0.9, in_flight=1, start_s=now_s)
    assert rule.limit == 1


def test_between_the_two_marks_it_rests() -> None:
    rule = Admission(100_000)
    serve(rule, 500, 0.15, in_flight=4)
    assert rule.limit == 4
    assert rule.thrash == pytest.approx(0.15, abs=0.02)


def test_a_footprint_seen_later_does_not_undo_what_was_found() -> None:
    rule = Admission(100_000)
    serve(rule, 4, 0.0, in_flight=4)
    rule.ended(1_000, 4, 4 * 1_000)
    assert rule.limit == 5


def test_marks_must_make_sense() -> None:
    with pytest.raises(ConfigError, match="low < high"):
        AdmissionOptions(low=0.3, high=0.2)

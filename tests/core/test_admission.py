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
        rule.called(again_s, again_s, token_s, start_s + i * every_s, in_flight)
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


def test_as_many_as_cannot_hurt_come_in_without_waiting() -> None:
    """Four runs call once a second together; a run makes 40 calls. If nothing were found, a prompt would take 0.05 s,
    0.5 s or 2 s: with 80, 8 and 2 runs prefill would take half of the time."""
    grown = []
    for token_s in (0.00005, 0.0005, 0.002):
        rule = Admission(100_000)
        rule.ended(50_000, 40, 40_000)
        now_s = 0.0
        for _ in range(80):
            rule.called(0.0, 0.0, token_s, now_s, in_flight=rule.limit)
            now_s += 4.0 / rule.limit
        grown.append(rule.limit)
    assert grown == [68, 8, 5]  # towards 80; at 8; one more every quarter of a run, as thrash allows


def test_how_many_cannot_hurt_is_not_known_before_a_run_has_ended() -> None:
    rule = Admission(100_000)
    serve(rule, 10, 0.0, in_flight=4)
    assert rule.bearable == 0.0
    rule.ended(50_000, 4, 4_000)
    assert rule.bearable == pytest.approx(4.0, abs=1.0)  # a second for every prompt, and a prompt every second
    serve(rule, 200, 0.0, in_flight=4, start_s=10.0, token_s=0.0001)
    assert rule.bearable == pytest.approx(40.0, abs=1.0)


def test_prefill_leaves_less_to_share() -> None:
    """Of every second 0.6 s are prefill: more runs share only the other 0.4 s."""
    rule = Admission(100_000)
    rule.ended(50_000, 4, 4_000)
    for i in range(200):
        rule.called(0.0, 0.6, 0.001, float(i), in_flight=4)
    assert rule.bearable == pytest.approx(1.6, abs=0.1)


def test_thrash_does_not_hold_back_runs_that_cannot_hurt() -> None:
    rule = Admission(100_000)
    rule.ended(50_000, 4, 4_000)
    serve(rule, 2_000, 0.3, in_flight=16, token_s=0.0008)
    assert rule.thrash == pytest.approx(0.3, abs=0.02)
    assert rule.bearable == pytest.approx(14.0, abs=0.1)  # 16 runs share 0.7 s of a second, a prompt takes 0.8 s
    assert rule.limit == 13  # nearly


def test_a_pause_does_not_make_prompts_look_cheap() -> None:
    rule = Admission(100_000)
    rule.ended(50_000, 4, 4_000)
    now_s = serve(rule, 100, 0.3, in_flight=4)
    before = rule.limit, rule.thrash, rule.bearable
    assert before == pytest.approx((2, 0.3, 2.8), abs=0.01)
    serve(rule, 2, 0.3, in_flight=4, start_s=now_s + 600.0)
    assert rule.limit <= 4
    assert rule.thrash > 0.25 * before[1]
    assert rule.bearable < 4 * before[2]


@pytest.mark.parametrize("before", [1, 2, 3])
def test_a_crowd_after_an_idle_hour_does_not_rush_in(before: int) -> None:
    """A quiet engine, an hour of nobody, then runs whose prefill is all that the engine does: nothing is bearable."""
    rule = Admission(100_000)
    rule.ended(50_000, 4, 4 * 800)
    now_s = serve(rule, 30, 0.0, in_flight=before, every_s=2.0, token_s=0.001) + 3_600
    limits = []
    for _ in range(100):
        now_s += 0.8
        rule.called(0.5, 0.8, 0.001, now_s, in_flight=rule.limit)
        limits.append(rule.limit)
    assert max(limits) <= 16  # for a while the hour looks like room: 8 mean gaps of it
    assert limits[-1] < 4


def test_thrash_does_not_shrink_the_limit_below_what_cannot_hurt() -> None:
    rule = Admission(100_000)
    rule.ended(10_000, 4, 4 * 1_000)
    assert rule.limit == 20
    now_s = 0.0
    for _ in range(600):  # every run calls each ten seconds; a whole prompt takes .7 s, thrash .3 of the time
        gap_s = 10.0 / rule.limit
        now_s += gap_s
        rule.called(0.3 * gap_s, 0.3 * gap_s, 0.0007, now_s, in_flight=rule.limit)
    assert rule.thrash > rule.options.high
    assert rule.limit in (9, 10)


def test_there_is_no_hurry_while_there_is_room() -> None:
    rule = Admission(100_000)
    rule.ended(50_000, 4, 4 * 1_000)
    serve(rule, 50, 0.0, in_flight=2, token_s=0.00001)
    assert rule.bearable > 100
    assert rule.limit == 4


def test_a_run_without_calls_teaches_nothing_that_could_hurt() -> None:
    rule = Admission(100_000)
    rule.ended(0, 0, 0)
    assert (rule.limit, rule.bearable) == (4, 0.0)


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

"""A call that is over: from then on only the tool's time stands between the run and its next call."""

import numpy as np

from pbkv_ray.core.forecast import Forecast
from pbkv_ray.core.reuse import ReuseIndex, Tier
from pbkv_ray.core.scores import TimeScore

ON = Forecast(("coder",), np.array([[0.9, 0.1]] * 4))


def index() -> ReuseIndex[str]:
    """The coder answers in 1 s or in 90 s, its tool takes 5 s; a and b have just called."""
    made: ReuseIndex[str] = ReuseIndex(TimeScore())
    for i in range(60):
        answer_s = 90.0 if i % 2 else 1.0
        made.owners.waits.observe("flow", "coder", answer_s + 5.0, answer_s)
    for run in ("a", "b"):
        made.call(run, "coder", workflow="flow", at_s=10.0)
        made.add(run, 100)
        made.set_tier(run, Tier.DEVICE, resident=True, evictable=True)
        made.use(run, run, "coder", workflow="flow")
        made.update(run, ON, version=1, at_s=10.0, workflow="flow")
    return made


def test_who_still_answers_is_needed_later_than_who_has_answered() -> None:
    made = index()
    made.answered("b", at_s=20.0)
    assert made.peek(Tier.DEVICE) == "a"


def test_who_answered_first_calls_first() -> None:
    made = index()
    made.answered("b", at_s=20.0)
    made.answered("a", at_s=22.0)
    assert made.peek(Tier.DEVICE) == "a"


def test_what_the_next_call_reads_is_weighed_by_the_trail_of_its_own_run() -> None:
    """The coder in turn goes on with its prompt and begins anew: which is next, only the run's own last call tells."""
    made: ReuseIndex[str] = ReuseIndex(TimeScore())
    for run in range(40):
        for block in (1, 1, 2, 2, 3, 3):
            made.call(f"r{run}", "coder", workflow="flow", blocks=[1_000 * run + block] * 4, at_s=float(run))
    on = Forecast(("coder",), np.array([[1.0, 0.0]]))
    for run, blocks in (("began", (-1,)), ("went on", (-2, -2))):
        for block in blocks:
            made.call(run, "coder", workflow="flow", blocks=[block] * 4, at_s=50.0)
        made.add(run, 64)
        made.set_tier(run, Tier.DEVICE, resident=True, evictable=True)
        made.use(run, run, "coder", workflow="flow")
        made.update(run, on, version=1, at_s=50.0, workflow="flow")
    assert made.peek(Tier.DEVICE) == "went on"
    assert made.next_call("began") > 0.9
    assert made.next_call("went on") < 0.1


def test_the_next_call_teaches_how_long_the_tool_took() -> None:
    made: ReuseIndex[str] = ReuseIndex(TimeScore())
    for at_s in range(0, 600, 3):  # a second for the answer, two for the tool
        made.call("a", "coder", workflow="flow", at_s=at_s)
        made.answered("a", at_s=at_s + 1.0)
    idle, answer, whole = (made.owners.waits.curve("flow", "coder", part)[1] for part in ("idle", "answer", "whole"))
    assert abs(idle - 2.0) < 0.4
    assert abs(answer - 1.0) < 0.4
    assert abs(whole - 3.0) < 0.6


def test_a_run_that_calls_twice_at_a_time_has_answered_when_both_have_ended() -> None:
    made = index()
    made.call("b", "coder", workflow="flow", at_s=11.0)
    made.update("b", ON, version=2, at_s=11.0, workflow="flow")
    made.answered("b", at_s=12.0)
    made.tick(20.0)
    assert made.owners.runs["b"].answered_s is None
    made.answered("b", at_s=21.0)
    assert made.owners.runs["b"].answered_s == 21.0
    made.answered("b", at_s=22.0)  # once too often
    assert made.owners.runs["b"].calling == 0


def test_ends_that_come_late_or_of_strangers_change_nothing() -> None:
    made = index()
    made.answered("never heard of", at_s=11.0)
    made.end("b", at_s=12.0)
    made.answered("b", at_s=13.0)
    assert made.peek(Tier.DEVICE) == "b"
    assert "never heard of" not in made.owners.runs
    made.check_invariants()

"""New runs wait while what the running ones hold does not fit; running ones never do."""

from pbkv_ray.core.admission import AdmissionOptions
from pbkv_ray.core.calls import CacheReport
from pbkv_ray.core.events import CallFinished
from pbkv_ray.core.gate import Gate
from pbkv_ray.core.misses import Missed

POOL = 10_000


def call(run: str, prompt: int, cached: int, at_s: float, report: CacheReport | None = None) -> CallFinished:
    """1,000 tokens a second; no output."""
    first_token_s = (prompt - cached) / 1_000
    return CallFinished(
        run, "coder", 1, "c", at_s, "stop", prompt, 0, cached, report=report, first_token_s=first_token_s
    )


def test_what_fits_begins_at_once_however_many() -> None:
    gate = Gate(POOL)
    for number in range(20):
        assert gate.held(number) is None
        gate.called(call(f"run{number}", 300, 0, at_s=float(number)))
    assert gate.rule.limit < 20


def test_beyond_the_pool_new_runs_wait_and_are_told_why() -> None:
    gate = Gate(POOL)
    for number in range(4):
        gate.called(call(f"run{number}", 3_000, 0, at_s=float(number)))
    assert gate.held(4) is None  # nothing was computed again so far: one more may try
    assert gate.held(5) == (
        "5 runs are in flight, and with one more they would hold about 12000 tokens of a cache of 10000; 5 may run "
        "until one ends. 0% of the engines' time goes into computing again what was evicted"
    )
    gate.ended("run0")
    assert gate.held(4) is None


def test_a_run_that_has_not_called_yet_counts_as_half_of_what_runs_hold() -> None:
    gate = Gate(POOL, options=AdmissionOptions(cold_runs=1))
    gate.called(call("first", 8_000, 0, at_s=0.0))
    gate.ended("first")
    assert gate.rule.limit == 2  # two halves of 8,000 fit
    assert gate.held(1) is None
    assert gate.held(2) is not None


def test_computing_again_what_was_evicted_lowers_the_limit_and_what_is_new_does_not() -> None:
    new, again = Gate(POOL), Gate(POOL)
    for number in range(40):
        run = f"run{number % 8}"
        new.called(call(run, 1_000 * (1 + number // 8), 1_000 * (number // 8), at_s=float(number)))
        again.called(call(run, 1_000 * (1 + number // 8), 0, at_s=float(number)))
    assert new.rule.thrash == 0.0
    assert again.rule.thrash > 0.5
    assert again.rule.limit < new.rule.limit


def test_the_engines_own_account_of_what_it_had_evicted_is_taken_where_there_is_one() -> None:
    gate = Gate(POOL)
    report = CacheReport((Missed(0, 100, "evicted"), Missed(100, 900, "never_cached"), Missed(900, 950, "demoted")))
    for number in range(4):
        gate.called(call("run", 1_000, 0, at_s=float(number), report=report))
    assert 0.05 < gate.rule.thrash < 0.2  # a tenth of a second of every one


def test_one_run_may_always_run() -> None:
    gate = Gate(POOL)
    for number in range(400):
        gate.called(call("giant", 50_000, 0, at_s=float(number)))
    gate.ended("giant")
    assert gate.rule.limit == 1
    assert gate.held(0) is None
    assert gate.held(1) is not None

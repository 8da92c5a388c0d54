"""A call in the engine's queue: what it is about to read is worth more than anything that is merely expected."""

import numpy as np

from pbkv_ray.core.forecast import Forecast
from pbkv_ray.core.reuse import ReuseIndex, Tier
from pbkv_ray.core.scores import PaperScore, TimeScore


def index(score: object) -> ReuseIndex[str]:
    """Runs a and b have read one node each, at the same time; a's forecast is that it ends, b's that it goes on."""
    made: ReuseIndex[str] = ReuseIndex(score)  # type: ignore[arg-type]
    for run in ("a", "b"):
        made.call(run, "coder", at_s=10.0)
        made.add(run, 100)
        made.set_tier(run, Tier.DEVICE, resident=True, evictable=True)
        made.use(run, run, "coder")
    made.update("a", Forecast(("coder",), np.array([[0.1, 0.9]])), version=1, at_s=11.0)
    made.update("b", Forecast(("coder",), np.array([[0.9, 0.1]])), version=1, at_s=11.0)
    return made


def test_a_queued_call_protects_what_it_will_read() -> None:
    made = index(TimeScore())
    assert made.peek(Tier.DEVICE) == "a"
    made.owners.waits_for("a", "coder")
    assert made.peek(Tier.DEVICE) == "b"


def test_once_it_is_served_the_forecast_counts_again() -> None:
    made = index(TimeScore())
    made.owners.waits_for("a", "coder")
    made.call("a", "coder", at_s=12.0)
    made.use("a", "a", "coder")
    assert made.peek(Tier.DEVICE) == "a"


def test_the_one_that_waits_longer_is_served_sooner() -> None:
    made = index(TimeScore())
    made.tick(12.0)
    made.owners.waits_for("b", "coder")
    made.tick(14.0)
    made.owners.waits_for("a", "coder")
    made.tick(15.0)
    assert made.peek(Tier.DEVICE) == "a"


def test_the_papers_score_knows_no_queue_and_ended_runs_have_none() -> None:
    made = index(PaperScore())
    made.owners.waits_for("a", "coder")
    assert made.peek(Tier.DEVICE) == "a"
    timed = index(TimeScore())
    timed.end("a")
    timed.owners.waits_for("a", "coder")
    assert "a" not in timed.owners.runs

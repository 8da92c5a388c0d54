"""What is kept of a run: its calls with what the engine said of them, once all of it has had time to come."""

import numpy as np

from pbkv_ray.core.events import CallFinished, CallStarted, CallState, RunEnded, RunStarted, Tick
from pbkv_ray.core.journal import Journal, JournalOptions, RecordedCall, RecordedRun

VECTOR = np.array([1.0, -2.5], np.float16)
BLOCKS = np.array([7, 8, 9], np.int64)


def started(call_id: str, agent: str, at_s: float, run_id: str = "r1") -> CallStarted:
    return CallStarted(run_id, agent, 1, call_id, at_s)


def finished(call_id: str, agent: str, at_s: float, run_id: str = "r1") -> CallFinished:
    return CallFinished(run_id, agent, 1, call_id, at_s, "stop", 100, 20, 60, 10, 0.8, "replica-a")


def note(journal: Journal, *events) -> None:
    for event in events:
        journal.note(event)


def test_a_run_is_kept_with_the_states_that_came_before_and_after_their_calls():
    journal = Journal(JournalOptions(settle_s=2.0))
    note(
        journal,
        Tick(10.0),
        RunStarted("r1", "swe", 1.0),
        CallState("c1", "prefill", VECTOR, BLOCKS),  # faster than the runner's event
        started("c1", "planner", 1.5),
        finished("c1", "planner", 2.3),
        started("c2", "coder", 4.0),
        RunEnded("r1", "completed", 5.0),
        CallState("c1", "decode", VECTOR * 2),
        Tick(11.0),
        Tick(12.9),
    )
    assert journal.take() == [], "what is late may still come"
    note(journal, Tick(13.0))
    assert journal.take() == [
        RecordedRun(
            "r1", "swe", 1.0, 5.0, "completed",
            [
                RecordedCall(
                    "c1", "planner", 1, 1.5, 0.8, "stop", 100, 20, 60, 10, "replica-a",
                    VECTOR.tobytes(), (VECTOR * 2).tobytes(), BLOCKS.tobytes(),
                ),
                RecordedCall("c2", "coder", 1, 4.0),
            ],
        )
    ]  # fmt: skip
    assert (journal.take(), len(journal)) == ([], 0)


def test_runs_without_calls_are_none_and_silent_runs_are_left_out():
    journal = Journal(JournalOptions(settle_s=1.0, silent_s=10.0))
    note(journal, RunStarted("idle", "swe", 0.0), RunEnded("idle", "completed", 0.0), started("c", "a", 0.0, "lost"))
    note(journal, Tick(1.0), Tick(10.0))
    assert (journal.take(), len(journal)) == ([], 1)
    note(journal, Tick(11.0))
    assert (journal.take(), len(journal), journal.counts["runs_left_out"]) == ([], 0, 1)


def test_what_came_before_the_first_tick_is_not_old():
    journal = Journal()
    now = 1.8e9
    note(journal, RunStarted("r1", "swe", now), started("c1", "planner", now))
    note(journal, Tick(now + 1.0))
    assert journal.take() == []
    note(journal, finished("c1", "planner", now + 1.5), started("c2", "coder", now + 1.5), Tick(now + 2.0))
    note(journal, RunEnded("r1", "completed", now + 2.5), Tick(now + 3.0), Tick(now + 5.0))
    (run,) = journal.take()
    assert (run.workflow, [call.call_id for call in run.calls], journal.counts) == ("swe", ["c1", "c2"], {})


def test_a_tick_that_comes_late_does_not_cut_the_wait_for_what_the_engine_says():
    journal = Journal(JournalOptions(settle_s=2.0))
    note(journal, Tick(10.0), RunStarted("r1", "swe", 1.0), started("c1", "planner", 1.0))
    note(journal, RunEnded("r1", "completed", 2.0), Tick(60.0))
    assert journal.take() == [], "nothing was read for 50 s, the state neither"
    note(journal, CallState("c1", "decode", VECTOR), Tick(62.0))
    assert [call.decode for call in journal.take()[0].calls] == [VECTOR.tobytes()]


def test_a_run_whose_beginning_was_not_heard_is_left_out_also_when_it_is_announced_again():
    journal = Journal(JournalOptions(settle_s=1.0))
    note(journal, started("c2", "coder", 0.0), RunStarted("r1", "swe", 0.0), RunEnded("r1", "completed", 1.0))
    note(journal, Tick(1.0), Tick(2.0))
    assert (journal.take(), len(journal), journal.counts) == ([], 0, {"runs_left_out": 1})


def test_everything_is_bounded_and_what_is_dropped_is_counted():
    journal = Journal(JournalOptions(max_runs=2, max_calls=2, max_state_bytes=6, max_early=1))
    for run in "xyz":
        note(journal, RunStarted(run, "swe", 0.0), *(started(f"{run}{n}", "a", 0.0, run) for n in range(3)))
    note(journal, CallState("y0", "prefill", VECTOR), CallState("y1", "prefill", VECTOR))
    note(journal, CallState("unknown", "prefill", VECTOR), CallState("other", "decode", VECTOR))
    assert len(journal) == 2
    assert journal.counts == {"calls_left_out": 3, "runs_left_out": 1, "states_left_out": 2}
    # Room is given back with the run.
    note(journal, RunEnded("y", "completed", 1.0), Tick(3.0), Tick(5.0))
    (run,) = journal.take()
    assert [call.prefill for call in run.calls] == [VECTOR.tobytes(), None]
    note(journal, CallState("z0", "prefill", VECTOR), RunEnded("z", "completed", 1.0), Tick(7.0), Tick(9.0))
    assert journal.take()[0].calls[0].prefill == VECTOR.tobytes()


def test_a_run_that_a_restarted_controller_hears_of_in_its_middle_is_left_out():
    journal = Journal(JournalOptions(settle_s=2.0))
    for run_id, again in (("whole", False), ("half", True)):
        call = f"call of {run_id}"
        note(
            journal,
            RunStarted(run_id, "swe", 1.0, again=again),
            started(call, "planner", 1.5, run_id),
            finished(call, "planner", 2.3, run_id),
            RunEnded(run_id, "completed", 5.0),
        )
    note(journal, Tick(6.0), Tick(9.0))
    assert [run.run_id for run in journal.take()] == ["whole"]

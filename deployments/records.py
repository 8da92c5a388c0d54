"""Stored runs and calls as the protocol shows them."""

from dataclasses import asdict

from deployments.encoding import iso
from deployments.endings import STOPS
from deployments.kv import report_text
from deployments.service import Json
from pbkv_ray.core.events import CallFinished
from pbkv_ray.store import CallRow, RunRow


def run_json(row: RunRow) -> Json:
    """`attempt`, `error`, `seconds` and `events_dropped` are ours beyond the SDK's fields."""
    times: Json = {} if row.started_at is None else {"started_at": iso(row.started_at)}
    if row.ended_at is not None:
        times |= {"ended_at": iso(row.ended_at)}
        if row.started_at is not None:
            times |= {"seconds": row.ended_at - row.started_at}
    error = {} if row.error is None else {"error": {"error": row.error, "message": row.message}}
    return {
        "run_id": row.run_id,
        "thread_id": row.thread_id,
        "assistant_id": row.workflow,
        "created_at": iso(row.created_at),
        "updated_at": iso(row.updated_at),
        "status": row.status,
        "metadata": row.metadata,
        "multitask_strategy": row.multitask,
        "attempt": row.attempt,
        "events_dropped": row.events_dropped,
        **times,
        **error,
    }


def queued_json(row: RunRow, place: int | None, held: str | None) -> Json:
    """`run_json`; while the run waits also `queue`: its place, from 1 on (None: far behind), and what it waits for."""
    if row.status != "pending":
        return run_json(row)
    return {**run_json(row), "queue": {"position": place, "reason": held or "a place at a runner"}}


def gone() -> Json:
    """The error of a run that was rolled back while someone waited for it."""
    name, message = STOPS["rollback"]
    return {"error": name, "message": message}


def call_row(event: CallFinished, attempt: int) -> CallRow:
    return CallRow(
        run_id=event.run_id,
        attempt=attempt,
        call_id=event.call_id,
        agent=event.agent,
        step=event.step,
        reason=event.reason,
        prompt_tokens=event.prompt_tokens,
        device_cached_tokens=event.device_cached_tokens,
        host_cached_tokens=event.host_cached_tokens,
        output_tokens=event.output_tokens,
        seconds=event.seconds,
        replica=event.replica,
        at_s=event.at_s,
        report=report_text(event.report),
    )


def call_json(order: int, call: CallRow) -> Json:
    shown = asdict(call)
    del shown["report"]  # that is deployments.kv's
    return {"order": order, **shown}

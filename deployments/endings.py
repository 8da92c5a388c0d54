"""How runs end, as what the store keeps of it."""

from typing import Literal

from deployments.encoding import to_json
from deployments.graphs import ThreadView
from pbkv_ray.store import Ending, RunRow, ThreadStatus

STOPS = {
    "interrupt": ("UserInterrupt", "the run was cancelled"),
    "rollback": ("UserRollback", "the run was cancelled and rolled back"),
}


def finished(run: RunRow, view: ThreadView) -> Ending:
    """An ending without an error: all done, or waiting for a person. The output names what the person is asked."""
    status: Literal["interrupted", "success"] = "interrupted" if view.waiting else "success"
    asked = [one for several in view.interrupts.values() for one in several]
    output = {**view.values, "__interrupt__": asked} if asked and isinstance(view.values, dict) else view.values
    end = to_json({"run_id": run.run_id, "status": status})
    return Ending(status, view.status, (("end", end),), output=to_json(output), state=view.state)


def failed(error: str, message: str, state: str | None) -> Ending:
    return _closed("error", "error", error, message, state)


def timed_out(limit_s: float, state: str | None) -> Ending:
    message = f"the run took longer than {limit_s:g} s, the most that a run may take"
    return _closed("timeout", "error", "RunTimeout", message, state)


def stopped(reason: str, view: ThreadView) -> Ending:
    """Cancelled by someone; `reason` is a key of STOPS. The thread is where its newest checkpoint is."""
    return _closed("interrupted", view.status, *STOPS[reason], view.state)


def _closed(
    status: Literal["error", "timeout", "interrupted"],
    thread_status: ThreadStatus,
    error: str,
    message: str,
    state: str | None,
) -> Ending:
    said = {"error": error, "message": message}
    return Ending(
        status,
        thread_status,
        (("error", to_json(said)),),
        output=to_json({"__error__": said}),
        error=error,
        message=message,
        state=state,
    )

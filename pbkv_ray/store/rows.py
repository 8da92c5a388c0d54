"""What the store takes and gives: one frozen dataclass a table."""

from dataclasses import dataclass, field
from typing import Any, Literal

Json = dict[str, Any]
Stop = Literal["interrupt", "rollback"]
RunStatus = Literal["pending", "running", "success", "error", "timeout", "interrupted"]
ThreadStatus = Literal["idle", "busy", "interrupted", "error"]
Multitask = Literal["reject", "enqueue", "interrupt", "rollback"]

INFLIGHT: tuple[RunStatus, ...] = ("pending", "running")


@dataclass(frozen=True, slots=True)
class ThreadRow:
    """`state` is a JSON text {"values", "interrupts"}: the thread as its newest run left it."""

    thread_id: str
    workflow: str | None
    status: ThreadStatus
    metadata: Json
    state: str
    ephemeral: bool
    created_at: float
    updated_at: float


@dataclass(frozen=True, slots=True)
class NewRun:
    """A run that asks to be admitted. `request` is a JSON text that only the runner reads."""

    run_id: str
    thread_id: str
    workflow: str
    multitask: Multitask
    request: str
    metadata: Json = field(default_factory=dict)
    head_start_s: float = 0.0  # it waits as if it had come so much earlier


@dataclass(frozen=True, slots=True)
class RunRow:
    """A stored run. `attempt` counts the runners that executed it; `last_seq` is its newest event's number."""

    position: int
    run_id: str
    thread_id: str
    workflow: str
    status: RunStatus
    multitask: Multitask
    metadata: Json
    request: str
    attempt: int
    owner: str | None
    lease_until: float | None
    stop_request: Stop | None
    base_checkpoint: str | None
    last_seq: int
    events_dropped: int
    output: str | None
    error: str | None
    message: str | None
    created_at: float
    updated_at: float
    started_at: float | None
    ended_at: float | None
    head_start_s: float

    @property
    def inflight(self) -> bool:
        return self.status in INFLIGHT


@dataclass(frozen=True, slots=True)
class Admission:
    """An admitted run, and the running ones of its thread that were asked to stop in its favour."""

    run: RunRow
    stopping: tuple[RunRow, ...] = ()


@dataclass(frozen=True, slots=True)
class Ending:
    """How a run ends: its status, what it leaves in its thread, and its closing events (name, JSON text)."""

    status: RunStatus
    thread_status: ThreadStatus
    events: tuple[tuple[str, str], ...] = ()
    output: str | None = None
    error: str | None = None
    message: str | None = None
    state: str | None = None  # None leaves the thread's state as it is


@dataclass(frozen=True, slots=True)
class EventRow:
    run_id: str
    seq: int
    event: str
    data: str


@dataclass(frozen=True, slots=True)
class CallRow:
    """One LLM call of a run. Cached tokens are prompt tokens found in the device or the host tier."""

    run_id: str
    attempt: int
    call_id: str
    agent: str
    step: int
    reason: str
    prompt_tokens: int
    device_cached_tokens: int
    host_cached_tokens: int
    output_tokens: int
    seconds: float
    replica: str
    at_s: float
    report: str | None = None  # JSON, only read by `Events.calls_of(reports=True)`

"""What the gateway asks of the runner: LangGraph's Agent Protocol without HTTP.

`deployments.runner.Runner` implements it; the gateway reaches it in process (tests) or through a Serve handle.
Dicts are the JSON objects of the protocol (`langgraph_sdk.schema`: Thread, ThreadState, Run). Every method
raises NotFoundError for an unknown id, ConflictError and InputError as their docstrings say.
"""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

Json = dict[str, Any]
Multitask = Literal["reject", "enqueue", "interrupt", "rollback"]
StreamMode = Literal[
    "values", "updates", "messages", "messages-tuple", "custom", "events", "debug", "tasks", "checkpoints"
]


@dataclass(frozen=True, slots=True)
class RunRequest:
    """A validated request for a run. `thread_id` None makes a stateless run (a thread of its own).

    ("*",) as `interrupt_before` or `interrupt_after` means every graph node.
    """

    workflow: str
    input: Json | None
    thread_id: str | None = None
    metadata: Json = field(default_factory=dict)
    config: Json = field(default_factory=dict)
    command: Json | None = None
    stream_mode: tuple[StreamMode, ...] = ("values",)
    multitask: Multitask = "reject"
    interrupt_before: tuple[str, ...] = ()
    interrupt_after: tuple[str, ...] = ()
    keep_thread: bool = True
    cancel_on_disconnect: bool = False
    cache_salt: str | None = None
    head_start_s: float = 0.0  # where runs wait, it counts as come so much earlier


@dataclass(frozen=True, slots=True)
class RunEvent:
    """One server-sent event of a run. `seq` counts from 1 within the run and is the SSE id; `data` is JSON."""

    seq: int
    event: str
    data: str


class RunService(Protocol):
    async def create_thread(
        self, thread_id: str | None, metadata: Json, if_exists: Literal["raise", "do_nothing"]
    ) -> Json:
        """ConflictError when it exists and `if_exists` is "raise"."""

    async def get_thread(self, thread_id: str) -> Json: ...
    async def update_thread(self, thread_id: str, metadata: Json) -> Json: ...
    async def search_threads(self, metadata: Json, status: str | None, limit: int, offset: int) -> list[Json]: ...
    async def delete_thread(self, thread_id: str) -> None: ...
    async def thread_state(self, thread_id: str, checkpoint_id: str | None) -> Json: ...
    async def update_state(self, thread_id: str, values: Json | None, as_node: str | None) -> Json: ...
    async def thread_history(self, thread_id: str, limit: int, before: str | None) -> list[Json]: ...

    async def create_run(self, request: RunRequest) -> Json:
        """Store the run and start (or queue) it. ConflictError when the thread is busy and multitask is "reject";
        NotFoundError for an unknown workflow or thread; InputError for an input that the workflow refuses."""

    async def list_runs(self, thread_id: str | None, status: str | None, limit: int, offset: int) -> list[Json]: ...
    async def get_run(self, thread_id: str | None, run_id: str) -> Json: ...
    async def cancel_run(self, thread_id: str | None, run_id: str, action: Literal["interrupt", "rollback"]) -> None:
        """Stops the run, the LLM call it is in included; returns when it has stopped. No-op on an ended run."""

    async def delete_run(self, thread_id: str, run_id: str) -> None: ...
    async def wait_run(self, thread_id: str | None, run_id: str) -> Json:
        """Waits for the end; the final values, or {"__error__": {"error", "message"}}."""

    def stream_run(self, thread_id: str | None, run_id: str, after: int) -> AsyncIterator[RunEvent]:
        """The run's events with seq > after, live until the run ends: first "metadata" {"run_id", "attempt"}, last
        "end" {"run_id", "status"} or "error" {"error", "message"}. Leaving the iterator early cancels the
        run if (and only if) it was made with `cancel_on_disconnect`."""

    async def graph_json(self, workflow: str) -> Json: ...
    async def graph_schemas(self, workflow: str) -> Json: ...
    async def run_calls(self, run_id: str) -> Sequence[Json]:
        """The run's LLM calls: agent, step, prompt/cached/output tokens, seconds, replica."""

    async def run_kv(self, run_id: str) -> Json:
        """The run's LLM calls as the KV cache saw them: where each went and why, what it found, why not the rest."""

"""A run service for tests of the gateway: threads and runs in memory, runs that do what their input says.

`input = {"steps": n}` emits n "values" events and ends; with `"hold": true` the run waits before its end until the
test calls `release`; with `"fail": "why"` it ends in an error.
"""

import asyncio
import json
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from deployments.service import Json, RunEvent, RunRequest
from pbkv_ray.errors import ConflictError, InputError, NotFoundError

AT = "2026-01-01T00:00:00+00:00"


@dataclass
class FakeRun:
    row: Json
    request: RunRequest
    events: list[RunEvent] = field(default_factory=list)
    output: Json = field(default_factory=dict)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    released: asyncio.Event = field(default_factory=asyncio.Event)
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None

    def emit(self, event: str, data: object) -> None:
        self.events.append(RunEvent(len(self.events) + 1, event, json.dumps(data)))
        self.changed.set()
        self.changed = asyncio.Event()


class FakeRunService:
    def __init__(self) -> None:
        self.threads: dict[str, Json] = {}
        self.runs: dict[str, FakeRun] = {}
        self.requests: list[RunRequest] = []
        self.cancelled: dict[str, asyncio.Event] = {}
        self.readers = 0

    def release(self, run_id: str) -> None:
        self.runs[run_id].released.set()

    async def create_thread(
        self, thread_id: str | None, metadata: Json, if_exists: Literal["raise", "do_nothing"]
    ) -> Json:
        name = thread_id or str(uuid.uuid4())
        if name in self.threads:
            if if_exists == "raise":
                raise ConflictError(f"thread {name!r} exists; use if_exists='do_nothing' to get it")
            return self.threads[name]
        self.threads[name] = {
            "thread_id": name,
            "created_at": AT,
            "updated_at": AT,
            "metadata": metadata,
            "status": "idle",
            "values": {},
            "interrupts": {},
        }
        return self.threads[name]

    async def get_thread(self, thread_id: str) -> Json:
        if thread_id not in self.threads:
            raise NotFoundError(f"thread {thread_id!r} does not exist; POST /threads makes one")
        return self.threads[thread_id]

    async def update_thread(self, thread_id: str, metadata: Json) -> Json:
        thread = await self.get_thread(thread_id)
        thread["metadata"] = {**thread["metadata"], **metadata}
        return thread

    async def search_threads(self, metadata: Json, status: str | None, limit: int, offset: int) -> list[Json]:
        found = [
            thread
            for thread in self.threads.values()
            if metadata.items() <= thread["metadata"].items() and status in (None, thread["status"])
        ]
        return found[offset : offset + limit]

    async def delete_thread(self, thread_id: str) -> None:
        await self.get_thread(thread_id)
        del self.threads[thread_id]

    async def thread_state(self, thread_id: str, checkpoint_id: str | None) -> Json:
        thread = await self.get_thread(thread_id)
        if checkpoint_id not in (None, "c1"):
            raise NotFoundError(f"checkpoint {checkpoint_id!r} does not exist")
        checkpoint = {"thread_id": thread_id, "checkpoint_ns": "", "checkpoint_id": "c1", "checkpoint_map": None}
        return {
            "values": thread["values"],
            "next": [],
            "checkpoint": checkpoint,
            "metadata": {"step": 1},
            "created_at": AT,
            "parent_checkpoint": None,
            "tasks": [],
            "interrupts": [],
        }

    async def update_state(self, thread_id: str, values: Json | None, as_node: str | None) -> Json:
        thread = await self.get_thread(thread_id)
        thread["values"] = {**thread["values"], **(values or {})}
        return {"checkpoint": (await self.thread_state(thread_id, None))["checkpoint"]}

    async def thread_history(self, thread_id: str, limit: int, before: str | None) -> list[Json]:
        state = await self.thread_state(thread_id, None)
        return [] if before else [state][:limit]

    async def create_run(self, request: RunRequest) -> Json:
        thread_id = request.thread_id
        if thread_id is None:
            thread_id = (await self.create_thread(None, {}, "raise"))["thread_id"]
        await self.get_thread(thread_id)
        busy = [run for run in self.runs.values() if run.row["thread_id"] == thread_id and not run.ended.is_set()]
        if busy and request.multitask == "reject":
            raise ConflictError(f"thread {thread_id!r} is busy; wait, or choose another multitask_strategy")
        steps = (request.input or {}).get("steps", 1)
        if not isinstance(steps, int):
            raise InputError(f"steps is {steps!r}; it must be a number")
        self.requests.append(request)
        run_id = str(uuid.uuid4())
        row = {
            "run_id": run_id,
            "thread_id": thread_id,
            "assistant_id": request.workflow,
            "created_at": AT,
            "updated_at": AT,
            "status": "running",
            "metadata": request.metadata,
            "multitask_strategy": request.multitask,
        }
        run = self.runs[run_id] = FakeRun(row, request)
        self.cancelled[run_id] = asyncio.Event()
        run.task = asyncio.get_running_loop().create_task(self._execute(run, steps))
        await asyncio.sleep(0)  # a task that is cancelled before its first step would never end its run
        return dict(row)

    async def _execute(self, run: FakeRun, steps: int) -> None:
        asked = run.request.input or {}
        thread = self.threads[run.row["thread_id"]]
        thread["status"] = "busy"
        status = "success"
        try:
            run.emit("metadata", {"run_id": run.row["run_id"], "attempt": 1})
            for step in range(1, steps + 1):
                run.output = {"step": step}
                for mode in run.request.stream_mode:
                    run.emit(mode, {"step": step})
            if asked.get("hold"):
                await run.released.wait()
            if "fail" in asked:
                raise ValueError(asked["fail"])
            thread["values"] = run.output
            run.emit("end", {"run_id": run.row["run_id"], "status": "success"})
        except asyncio.CancelledError:
            status = "interrupted"
            run.emit("error", {"error": "Cancelled", "message": "the run was cancelled"})
        except ValueError as error:
            status = "error"
            run.output = {"__error__": {"error": "ValueError", "message": str(error)}}
            run.emit("error", run.output["__error__"])
        run.row["status"] = status
        thread["status"] = "error" if status == "error" else "idle"
        run.ended.set()

    def _run(self, thread_id: str | None, run_id: str) -> FakeRun:
        run = self.runs.get(run_id)
        if run is None or thread_id not in (None, run.row["thread_id"]):
            raise NotFoundError(f"run {run_id!r} does not exist")
        return run

    async def list_runs(self, thread_id: str | None, status: str | None, limit: int, offset: int) -> list[Json]:
        rows = [run.row for run in self.runs.values()]
        found = [row for row in rows if thread_id in (None, row["thread_id"]) and status in (None, row["status"])]
        return found[offset : offset + limit]

    async def get_run(self, thread_id: str | None, run_id: str) -> Json:
        return dict(self._run(thread_id, run_id).row)

    async def cancel_run(self, thread_id: str | None, run_id: str, action: Literal["interrupt", "rollback"]) -> None:
        run = self._run(thread_id, run_id)
        assert run.task is not None
        run.task.cancel()
        await run.ended.wait()
        self.cancelled[run_id].set()

    async def delete_run(self, thread_id: str, run_id: str) -> None:
        self._run(thread_id, run_id)
        del self.runs[run_id]

    async def wait_run(self, thread_id: str | None, run_id: str) -> Json:
        run = self._run(thread_id, run_id)
        await run.ended.wait()
        return run.output

    async def stream_run(self, thread_id: str | None, run_id: str, after: int) -> AsyncIterator[RunEvent]:
        run = self._run(thread_id, run_id)
        self.readers += 1
        try:
            position = after
            while True:
                changed = run.changed
                for event in run.events[position:]:
                    position = event.seq
                    yield event
                if run.ended.is_set() and position >= len(run.events):
                    return
                if position >= len(run.events):
                    await asyncio.wait(
                        [asyncio.ensure_future(changed.wait()), asyncio.ensure_future(run.ended.wait())],
                        return_when=asyncio.FIRST_COMPLETED,
                    )
        finally:
            await asyncio.sleep(0)  # a real one awaits here too; it must get the time
            self.readers -= 1

    async def graph_json(self, workflow: str) -> Json:
        return {"nodes": [{"id": "__start__", "type": "schema"}], "edges": []}

    async def graph_schemas(self, workflow: str) -> Json:
        return {"input_schema": {"type": "object"}, "output_schema": None, "state_schema": None}

    async def run_calls(self, run_id: str) -> Sequence[Json]:
        self._run(None, run_id)
        return [{"agent": "judge", "step": 1, "prompt_tokens": 7}]

    async def run_kv(self, run_id: str) -> Json:
        self._run(None, run_id)
        return {"run_id": run_id, "calls": []}


class FakeChat:
    """Answers `chunks` or a whole answer, remembers what it was asked, and whether it was left."""

    def __init__(self) -> None:
        self.asked: list[tuple[Json, Any, str | None]] = []
        self.error: Exception | None = None
        self.hold = asyncio.Event()
        self.hold.set()
        self.started = asyncio.Event()
        self.left = asyncio.Event()

    async def models(self) -> Json:
        return {"object": "list", "data": [{"id": "org/tiny", "object": "model", "created": 0, "owned_by": "test"}]}

    async def openai_chat(self, body: Json, caller: Any, cache_salt: str | None) -> Json | AsyncIterator[bytes]:
        self.asked.append((body, caller, cache_salt))
        self.started.set()
        if self.error is not None:
            raise self.error
        if body.get("stream"):
            return self._stream(body)
        try:
            await self.hold.wait()
        except asyncio.CancelledError:
            self.left.set()
            raise
        choice = {"index": 0, "message": {"role": "assistant", "content": "Hello there"}, "finish_reason": "stop"}
        return {
            "id": body["rid"],
            "object": "chat.completion",
            "created": 0,
            "model": "org/tiny",
            "choices": [choice],
            "usage": USAGE,
        }

    async def _stream(self, body: Json) -> AsyncIterator[bytes]:
        base = {"id": body["rid"], "object": "chat.completion.chunk", "created": 0, "model": "org/tiny"}
        try:
            for word in ("Hello", " there"):
                yield _event({**base, "choices": [{"index": 0, "delta": {"content": word}, "finish_reason": None}]})
                await self.hold.wait()
            yield _event({**base, "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
            yield _event({**base, "choices": [], "usage": USAGE})
            yield b"data: [DONE]\n\n"
        except (GeneratorExit, asyncio.CancelledError):
            self.left.set()
            raise


USAGE = {"prompt_tokens": 9, "completion_tokens": 2, "total_tokens": 11, "prompt_tokens_details": {"cached_tokens": 4}}


def _event(data: object) -> bytes:
    return b"data: " + json.dumps(data).encode() + b"\n\n"

"""The nouns of one LLM call: who calls, what it asks, what it got. Shared by graph, engine and deployments."""

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Literal, Protocol

from pbkv_ray.core.misses import Missed
from pbkv_ray.core.routing import Decision

Role = Literal["system", "user", "assistant", "tool"]


@dataclass(frozen=True, slots=True)
class Message:
    role: Role
    content: str


@dataclass(frozen=True, slots=True)
class Caller:
    """Who makes a call. `step` counts the run's graph steps (LangGraph's `langgraph_step`, from 1; a foreign run's
    calls, from 0)."""

    run_id: str
    workflow: str
    agent: str
    step: int
    parent_run_id: str | None = None


@dataclass(frozen=True, slots=True)
class Call:
    """One LLM request of a run by an agent. `call_id` is ours and is also SGLang's request id (`rid`).

    At most one of `json_schema` (a JSON text) and `regex` constrains the output.
    `cache_salt` separates tenants in the radix tree; only the server sets it.
    """

    call_id: str
    caller: Caller
    messages: tuple[Message, ...]
    max_tokens: int = 256
    temperature: float = 0.0
    json_schema: str | None = None
    regex: str | None = None
    stop: tuple[str, ...] = ()
    cache_salt: str | None = None


FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True, slots=True)
class CacheReport:
    """Why a call found in the cache what it found: where it was sent, as far as a router of ours decided, and what
    the device tier there did not hold."""

    missed: tuple[Missed, ...] = ()
    routed: Decision | None = None


@dataclass(frozen=True, slots=True)
class Reply:
    """What a call got. Cached tokens are prompt tokens found in the device or the host tier."""

    text: str
    reason: FinishReason
    prompt_tokens: int
    output_tokens: int
    device_cached_tokens: int
    host_cached_tokens: int
    seconds: float
    first_token_seconds: float
    replica: str = ""
    report: CacheReport | None = None


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of a streamed call; the last one, and only it, carries the whole `reply`."""

    text: str
    reply: Reply | None = None


class Transport(Protocol):
    """Takes a call to an engine. Closing the iterator early aborts the call in the engine.

    Raises EngineError when the engine failed, InputError when it refused the request.
    """

    def stream(self, call: Call) -> AsyncGenerator[Chunk, None]: ...

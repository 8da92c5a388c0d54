"""Calls to the engines through a Serve handle: errors as ours, retries before the first byte, aborts that arrive."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import replace
from typing import Any

from pbkv_ray.core.calls import CacheReport, Call, Caller, Chunk, Reply
from pbkv_ray.errors import EngineError, EngineLostError, PbkvError, UnavailableError
from pbkv_ray.routing.decisions import DECISIONS

Json = dict[str, Any]


class HandleTransport:
    """`core.calls.Transport`, and the gateway's chat backend, over the handle of the `Engine` deployment.

    A call whose replica died before its first chunk is tried again, `attempts` times in all, after `pause_s` and
    then twice as long each time; Serve itself never retries a call in flight. A caller that leaves or is cancelled
    cancels the request in the replica, and that aborts it in the scheduler: behind a handle nobody else does.
    """

    def __init__(self, handle: Any, *, attempts: int = 5, pause_s: float = 0.5) -> None:
        self._handle = handle
        self._attempts = attempts
        self._pause_s = pause_s

    async def stream(self, call: Call) -> AsyncGenerator[Chunk, None]:
        """See `Transport.stream`."""
        async with contextlib.aclosing(self._streamed("stream", call)) as chunks:
            async for chunk in chunks:
                yield chunk if chunk.reply is None else replace(chunk, reply=_routed(call, chunk.reply))

    async def openai_chat(
        self, body: Json, caller: Caller | None, cache_salt: str | None
    ) -> Json | AsyncIterator[bytes]:
        """See `EngineServer.openai_chat`; a stream's errors come with its first byte."""
        if body.get("stream"):
            return self._streamed("openai_stream", body, caller, cache_salt)
        answer: Json = await self._unary("openai_chat", body, caller, cache_salt)
        return answer

    async def models(self) -> Json:
        answer: Json = await self._unary("models")
        return answer

    async def metrics_text(self, timeout_s: float = 5.0) -> list[str]:
        """The metrics of every replica that answers in time."""
        response = self._handle.broadcast("metrics_text")
        texts = await response.results_async(timeout_s=timeout_s, return_exceptions=True)
        return [text for text in texts if isinstance(text, str)]

    async def _streamed(self, method: str, *arguments: Any) -> AsyncGenerator[Any, None]:
        for attempt in range(1, self._attempts + 1):
            response = self._handle.options(stream=True, method_name=method).remote(*arguments)
            begun = ended = False
            try:
                async for item in response:
                    begun = True
                    yield item
                ended = True
                return
            except Exception as error:
                ended = True
                if begun or attempt == self._attempts or not replica_died(error):
                    raise translated(error) from error
            finally:
                if not ended:  # the caller has left, or was cancelled
                    response.cancel()
            await asyncio.sleep(self._pause_s * 2 ** (attempt - 1))

    async def _unary(self, method: str, *arguments: Any) -> Any:
        for attempt in range(1, self._attempts + 1):
            response = self._handle.options(method_name=method).remote(*arguments)
            try:
                return await response
            except asyncio.CancelledError:
                response.cancel()
                raise
            except Exception as error:
                if attempt == self._attempts or not replica_died(error):
                    raise translated(error) from error
            await asyncio.sleep(self._pause_s * 2 ** (attempt - 1))


def _routed(call: Call, reply: Reply) -> Reply:
    """The reply with why it was sent where it was."""
    decision = DECISIONS.take(call.call_id)
    if decision is None:
        return reply
    return replace(reply, report=replace(reply.report or CacheReport(), routed=decision))


def replica_died(error: BaseException) -> bool:
    """True when the replica, or the way to it, is gone, and another one may answer."""
    from ray.exceptions import ActorDiedError, ActorUnavailableError, NodeDiedError, WorkerCrashedError
    from ray.serve.exceptions import ReplicaUnavailableError

    return isinstance(
        error, (ActorDiedError, ActorUnavailableError, NodeDiedError, WorkerCrashedError, ReplicaUnavailableError)
    )


def translated(error: BaseException, part: str = "engine") -> PbkvError:
    """Ray's errors as ours; one of ours that crossed a process comes back as it was."""
    from ray.exceptions import RayTaskError
    from ray.serve.exceptions import BackPressureError

    cause = error.cause if isinstance(error, RayTaskError) else error
    if isinstance(cause, PbkvError):
        return type(cause)(*cause.args)
    if isinstance(cause, BackPressureError):
        return UnavailableError(f"the {part} has no room: {cause}; try again later")
    if replica_died(cause):
        lost = EngineLostError if part == "engine" else UnavailableError
        return lost(f"the {part}'s replica died during the call ({type(cause).__name__}); try again")
    kind = EngineError if part == "engine" else UnavailableError
    return kind(f"the {part} failed: {type(cause).__name__}: {cause}")

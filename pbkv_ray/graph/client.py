"""The LLM client that agents get. It names run, agent and step on every call, and tells the controller of it."""

import json
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from time import time
from typing import Literal, TypeVar

from pydantic import BaseModel

from pbkv_ray.core.calls import Call, Message, Reply, Transport
from pbkv_ray.core.events import CallFinished, CallStarted, Event
from pbkv_ray.errors import EngineError, InputError
from pbkv_ray.graph.context import current_caller, current_run
from pbkv_ray.graph.listeners import Listeners

Emit = Callable[[Event], None]
T = TypeVar("T", bound=BaseModel)


class LLM:
    """Calls go to `transport`; `emit` must not block. A cancelled or abandoned call is aborted in the engine."""

    def __init__(
        self,
        transport: Transport,
        emit: Emit,
        *,
        clock: Callable[[], float] = time,
        new_id: Callable[[], str] = lambda: uuid.uuid4().hex,
    ) -> None:
        self._transport = transport
        self._emit = emit
        self._clock = clock
        self._new_id = new_id

    async def chat(
        self,
        messages: Sequence[Message],
        *,
        schema: type[BaseModel] | None = None,
        regex: str | None = None,
        max_tokens: int = 256,
        temperature: float = 0.0,
    ) -> str:
        """The answer's text; `schema` or `regex` constrains it. Raises EngineError, InputError."""
        parts = self.stream(messages, schema=schema, regex=regex, max_tokens=max_tokens, temperature=temperature)
        async with aclosing(parts) as stream:
            return "".join([piece async for piece in stream])

    async def structured(
        self, messages: Sequence[Message], schema: type[T], *, max_tokens: int = 256, temperature: float = 0.0
    ) -> T:
        """The answer as `schema`. Raises EngineError when it was cut before the object closed."""
        text = await self.chat(messages, schema=schema, max_tokens=max_tokens, temperature=temperature)
        try:
            return schema.model_validate_json(text)
        except ValueError as error:
            raise EngineError(
                f"the answer is no {schema.__name__}: {text[:80]!r} ({len(text)} characters); raise max_tokens "
                f"above {max_tokens} or bound the schema's strings with max_length"
            ) from error

    async def stream(
        self,
        messages: Sequence[Message],
        *,
        schema: type[BaseModel] | None = None,
        regex: str | None = None,
        max_tokens: int = 256,
        temperature: float = 0.0,
    ) -> AsyncGenerator[str, None]:
        """The answer piece by piece. Closing the iterator early aborts the call."""
        if schema is not None and regex is not None:
            raise InputError("schema and regex were both given; one constraint a call")
        call = Call(
            call_id=self._new_id(),
            caller=current_caller(),
            messages=tuple(messages),
            max_tokens=max_tokens,
            temperature=temperature,
            json_schema=None if schema is None else _json_schema(schema),
            regex=regex,
            cache_salt=current_run().cache_salt,
        )
        reply: Reply | None = None
        failed = False
        listeners = await Listeners.of(call)
        started_s = self._clock()
        self._started(call, started_s)
        try:
            async with aclosing(self._transport.stream(call)) as chunks:
                async for chunk in chunks:
                    reply = chunk.reply or reply
                    if chunk.text:
                        if listeners is not None:
                            await listeners.piece(chunk.text)
                        yield chunk.text
            if reply is None:
                raise EngineError(f"call {call.call_id} ended without its last chunk; the engine may have died")
            if listeners is not None:
                await listeners.ended(reply)
        except Exception as error:
            failed = True
            if listeners is not None:
                await listeners.failed(error)
            raise
        finally:
            self._finished(call, reply, "error" if failed else "abort", started_s)

    def _started(self, call: Call, at_s: float) -> None:
        caller = call.caller
        self._emit(CallStarted(caller.run_id, caller.agent, caller.step, call.call_id, at_s))

    def _finished(
        self, call: Call, reply: Reply | None, otherwise: Literal["error", "abort"], started_s: float
    ) -> None:
        caller, now_s = call.caller, self._clock()
        if reply is None:
            event = CallFinished(
                caller.run_id,
                caller.agent,
                caller.step,
                call.call_id,
                now_s,
                otherwise,
                seconds=now_s - started_s,
            )
        else:
            event = CallFinished(
                caller.run_id,
                caller.agent,
                caller.step,
                call.call_id,
                now_s,
                reply.reason,
                reply.prompt_tokens,
                reply.output_tokens,
                reply.device_cached_tokens,
                reply.host_cached_tokens,
                now_s - started_s,
                reply.replica,
                reply.report,
                reply.first_token_seconds,
            )
        self._emit(event)


def _json_schema(schema: type[BaseModel]) -> str:
    return json.dumps(schema.model_json_schema(), sort_keys=True)

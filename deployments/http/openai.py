"""OpenAI's chat protocol for foreign harnesses. SGLang's own serving class answers; here are names and limits."""

import json
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Annotated, Any, Protocol

from fastapi import APIRouter, Path, Request
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import to_json
from starlette.responses import Response

from deployments.http.body import described, read_json
from deployments.http.context import Gateway
from deployments.http.errors import cause_of, sentence, shown
from deployments.http.foreign import ForeignCall, ForeignRuns, Usage, reason_of, usage_of
from deployments.http.identity import identify
from deployments.http.openai_stream import ChatStream
from deployments.http.reserved import clean_chat
from deployments.http.streams import ByteStream, Pump, unless_gone
from pbkv_ray.core.calls import Caller
from pbkv_ray.errors import InputError, NotFoundError

Json = dict[str, Any]


class ChatBackend(Protocol):
    """What the engine deployment offers. Bodies and answers are OpenAI's."""

    async def openai_chat(
        self, body: Json, caller: Caller | None, cache_salt: str | None
    ) -> Json | AsyncIterator[bytes]:
        """`body["rid"]` is the call's id. With `body["stream"]` true: the bytes of the SSE stream, whose last chunk
        before [DONE] carries the usage; closing the iterator aborts the call, as does cancelling this coroutine.

        Raises InputError for a request the engine refuses, EngineError when the engine failed.
        """

    async def models(self) -> Json:
        """OpenAI's list: {"object": "list", "data": [{"id", ...}]}."""


class Message(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")

    role: Annotated[str, Field(min_length=1, max_length=32)]


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")

    include_usage: bool | None = None


Penalty = Annotated[float, Field(ge=-2, le=2)] | None
Tokens = Annotated[int, Field(ge=1, le=2**31 - 1)] | None


class Chat(BaseModel):
    """What the gateway reads or bounds; the engine checks the rest.

    The bounds are OpenAI's. Beyond them SGLang may answer an error, run out of memory (n) or lose its scheduler
    (numbers that fit no tensor).
    """

    model_config = ConfigDict(strict=True, extra="allow")

    messages: Annotated[list[Message], Field(min_length=1)]
    model: Annotated[str, Field(max_length=512)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=16)] | None = None
    max_tokens: Tokens = None
    max_completion_tokens: Tokens = None
    min_tokens: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = None
    frequency_penalty: Penalty = None
    presence_penalty: Penalty = None
    repetition_penalty: Annotated[float, Field(gt=0, le=2)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    logit_bias: (
        dict[Annotated[str, Field(pattern=r"^[0-9]{1,9}$")], Annotated[float, Field(ge=-100, le=100)]] | None
    ) = None
    stop: str | Annotated[list[str], Field(max_length=16)] | None = None
    stop_token_ids: Annotated[list[Annotated[int, Field(ge=0, le=2**31 - 1)]], Field(max_length=64)] | None = None


def router(gateway: Gateway, chat: ChatBackend, foreign: ForeignRuns) -> APIRouter:
    routes = APIRouter(prefix="/v1", tags=["openai"])

    @routes.post("/chat/completions", openapi_extra=described(Chat))
    async def completions(request: Request) -> Response:
        raw = await read_json(request)
        if not isinstance(raw, dict):
            raise InputError(f"the body is {shown(raw)}; it must be an object")
        who = identify(request.headers, raw)
        body = clean_chat(raw, gateway.metrics.stripped)
        try:
            asked = Chat.model_validate(body)
        except ValidationError as error:
            raise InputError(sentence(error.errors(), "the body", body)) from None
        tenant = gateway.tenant(request)
        if asked.stream:
            # We need the usage for the run's events; a caller that did not ask for it does not get to see it.
            body["stream_options"] = {**(body.get("stream_options") or {}), "include_usage": True}
        call = foreign.begin(who, tenant)
        body["rid"] = call.call_id
        headers = {"x-request-id": call.call_id}
        reason = "error"
        usage: Usage | None = None
        handed_over = False
        try:
            work = chat.openai_chat(body, call.caller, None if tenant is None else tenant.cache_salt)
            answer = await unless_gone(request, work)
            if answer is None:
                reason = "abort"
                return Response(status_code=499)  # nobody reads it; the number is nginx's for logs
            if isinstance(answer, dict):
                reason, usage = reason_of(answer) or "stop", usage_of(answer)
                text = to_json(answer, inf_nan_mode="null")  # the logprob of a token that a grammar forbids is -inf
                return Response(text, media_type="application/json", headers=headers)
            # The first chunk comes before the status, so that a refused request is a 4xx and no broken stream.
            first = await unless_gone(request, anext(answer, b""))
            if first is None:
                reason = "abort"
                return Response(status_code=499)
            stream = ChatStream(
                shows_usage=bool(asked.stream_options and asked.stream_options.include_usage),
                shows_tiers=body.get("return_cached_tokens_details") is True,
            )
            ending = _Ending(foreign, call, stream, answer)
            pump = Pump(_followed(first, answer, stream, ending), gateway.tasks, f"call {call.call_id}", ending.left)
            handed_over = True
            return ByteStream(pump, media_type="text/event-stream", headers={**headers, "cache-control": "no-store"})
        finally:
            if not handed_over:
                foreign.finish(call, reason, usage)

    @routes.get("/models")
    async def models() -> Json:
        return await chat.models()

    @routes.get("/models/{model:path}")
    async def model(model: Annotated[str, Path(max_length=512)]) -> Json:
        listed = (await chat.models())["data"]
        for entry in listed:
            if entry["id"] == model:
                found: Json = entry
                return found
        known = ", ".join(entry["id"] for entry in listed)
        raise NotFoundError(f"model {shown(model)} is not served; the models here are: {known}")

    return routes


class _Ending:
    """Finishes a streamed call once, however it ends: read to its end, broken, left, or never begun."""

    def __init__(
        self, foreign: ForeignRuns, call: ForeignCall, stream: ChatStream, answer: AsyncIterator[bytes]
    ) -> None:
        self._foreign = foreign
        self._call = call
        self._stream = stream
        self._answer = answer
        self._done = False

    def finish(self, reason: str) -> None:
        if not self._done:
            self._done = True
            self._foreign.finish(self._call, reason, self._stream.usage)

    async def left(self) -> None:
        self.finish("abort")
        if (close := getattr(self._answer, "aclose", None)) is not None:
            await close()


async def _followed(
    first: bytes, rest: AsyncIterator[bytes], stream: ChatStream, ending: _Ending
) -> AsyncGenerator[bytes, None]:
    """The stream's bytes to its end."""
    try:
        chunk: bytes | None = first
        while chunk is not None:
            if kept := stream.passed(chunk):
                yield kept
            chunk = await anext(rest, None)
        if unfinished := stream.rest():
            yield unfinished
        ending.finish(stream.reason or "stop")
    except Exception as error:  # the status is sent; what is left is to say it in the stream
        ending.finish("error")
        told = {"error": {"message": str(cause_of(error)), "type": "server_error", "param": None, "code": None}}
        yield b"data: " + json.dumps(told).encode() + b"\n\n"

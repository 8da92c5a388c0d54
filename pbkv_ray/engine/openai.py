"""OpenAI's chat protocol, answered by SGLang's own serving class; here are its errors, and aborts, as ours."""

import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any

from pbkv_ray.errors import EngineError, InputError, NotFoundError

Json = dict[str, Any]


class OpenAIChat:
    """Chat completions of one engine (an `sglang.Engine`) that serves the model `name`."""

    def __init__(self, engine: Any, name: str, abort: Callable[[str], None]) -> None:
        from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest
        from sglang.srt.entrypoints.openai.serving_chat import OpenAIServingChat

        self._request: Any = ChatCompletionRequest
        self._serving: Any = OpenAIServingChat(engine.tokenizer_manager, engine.template_manager)
        self._name = name
        self._abort = abort

    async def answer(
        self, body: Json, custom_params: Json | None, cache_salt: str | None
    ) -> Json | AsyncGenerator[bytes, None]:
        """The answer's JSON object, or with body["stream"] the bytes of the SSE stream; `body["rid"]` is the call's id.

        The server's own fields are set from the other arguments, whatever the body says. Raises InputError for a
        request that is refused (NotFoundError for a model that is not served), EngineError when the engine failed.
        """
        from pydantic import ValidationError

        rid = str(body["rid"])
        asked = body.get("model") or self._name
        if asked not in (self._name, "default"):
            raise NotFoundError(f"model {asked!r} is not served here; the model is {self._name!r}")
        ours = {
            "model": self._name,
            "cache_salt": cache_salt,
            "custom_params": custom_params,
            "return_cached_tokens_details": True,
        }
        try:
            request = self._request(**{**body, **ours})
        except ValidationError as error:
            raise InputError(_sentence(error.errors())) from None
        finished = False
        try:
            answer = await self._serving.handle_request(request, None)
            finished = True
        finally:
            if not finished:
                self._abort(rid)
        if hasattr(answer, "body_iterator"):
            return self._bytes(answer.body_iterator, rid)
        if hasattr(answer, "status_code"):
            raise _refusal(int(answer.status_code), bytes(answer.body))
        dumped: Json = answer.model_dump(mode="json")
        return dumped

    async def _bytes(self, chunks: AsyncIterator[str | bytes], rid: str) -> AsyncGenerator[bytes, None]:
        try:
            async for chunk in chunks:
                yield chunk.encode() if isinstance(chunk, str) else chunk
        finally:
            # Closing SGLang's outer generator does not close the inner ones: without this the call runs on.
            self._abort(rid)


def _refusal(status: int, body: bytes) -> InputError | EngineError:
    try:
        message = str(json.loads(body)["message"])
    except (ValueError, KeyError, TypeError):
        message = body.decode(errors="replace")
    return InputError(f"SGLang refused the request: {message}") if status < 500 else EngineError(message)


def _sentence(errors: list[Any]) -> str:
    """One sentence for the first few of pydantic's findings, without echoing the body."""
    found = [f"{'.'.join(str(part) for part in error['loc']) or 'the body'}: {error['msg']}" for error in errors[:3]]
    more = f" (and {len(errors) - 3} more)" if len(errors) > 3 else ""
    return f"the chat request is not valid: {'; '.join(found)}{more}"

"""Our calls as SGLang's requests, and its outputs and errors as our replies and errors."""

import contextlib
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

from pbkv_ray.core.calls import CacheReport, Call, FinishReason, Reply
from pbkv_ray.core.misses import Missed
from pbkv_ray.engine.hints import owner_params
from pbkv_ray.errors import EngineError, EngineLostError, InputError

Outputs = AsyncGenerator[dict[str, Any], None]  # what SGLang's generate_request yields


def prompt_of(call: Call, tokenizer: Any, room: int) -> list[int]:
    """The prompt's token ids, after the model's chat template. Raises InputError for `room` tokens or more."""
    if call.json_schema is not None and call.regex is not None:
        raise InputError(f"call {call.call_id} has a json_schema and a regex; give one of them")
    messages = [{"role": message.role, "content": message.content} for message in call.messages]
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except Exception as error:  # templates raise what they like
        raise InputError(f"the model's chat template refuses the messages of {call.call_id}: {error}") from error
    prompt: list[int] = tokenizer.encode(text, add_special_tokens=False, verbose=False)
    if len(prompt) >= room:
        raise InputError(
            f"the prompt has {len(prompt)} tokens; the engine takes fewer than {room}. Shorten it, or give the "
            "engine a larger context_length and device_pool_tokens"
        )
    return prompt


def request_of(call: Call, prompt: list[int], *, sessions: bool) -> Any:
    """SGLang's GenerateReqInput. `sessions`: the cache is SGLang's session-aware one, and the run is the session."""
    from sglang.srt.managers.io_struct import GenerateReqInput

    params: dict[str, Any] = {
        "max_new_tokens": call.max_tokens,
        "temperature": call.temperature,
        "stop": list(call.stop) or None,
        "json_schema": call.json_schema,
        "regex": call.regex,
        "custom_params": owner_params(call.caller),
    }
    return GenerateReqInput(
        rid=call.call_id,
        input_ids=prompt,
        sampling_params={name: value for name, value in params.items() if value is not None},
        stream=True,
        cache_salt=call.cache_salt,
        session_id=call.caller.run_id if sessions else None,
    )


def cached_tokens(meta: Mapping[str, Any]) -> tuple[int, int]:
    """Prompt tokens that the device and the host tier held, by the `meta_info` of an output."""
    cached = meta.get("cached_tokens_details") or {"device": meta.get("cached_tokens", 0)}
    return int(cached.get("device", 0)), int(cached.get("host", 0))


def reply_of(
    output: dict[str, Any], seconds: float, first_token_seconds: float, replica: str, missed: Sequence[Missed] | None
) -> Reply:
    """Of the last output of a request; `missed`: the spans of its prompt that the cache did not have, if reported."""
    meta = output["meta_info"]
    device, host = cached_tokens(meta)
    kind = meta["finish_reason"]["type"]
    reason: FinishReason = kind if kind in ("stop", "length") else "abort"
    return Reply(
        text=output["text"],
        reason=reason,
        prompt_tokens=int(meta.get("prompt_tokens", 0)),
        output_tokens=int(meta.get("completion_tokens", 0)),
        device_cached_tokens=device,
        host_cached_tokens=host,
        seconds=seconds,
        first_token_seconds=first_token_seconds,
        replica=replica,
        report=None if missed is None else CacheReport(tuple(missed)),
    )


async def translated(outputs: Outputs) -> Outputs:
    """SGLang's errors as ours: it raises ValueError before a request reaches the scheduler, and lets the scheduler
    end a stream with an abort that carries a status code."""
    try:
        async with contextlib.aclosing(outputs):
            async for output in outputs:
                finish = output["meta_info"]["finish_reason"] or {}
                status = finish.get("status_code")
                if status is not None and int(status) >= 400:
                    kind = EngineLostError if finish.get("lost") else InputError if int(status) < 500 else EngineError
                    raise kind(f"SGLang ended the request: {finish.get('message')}")
                yield output
    except ValueError as error:
        raise InputError(f"SGLang refused the request: {error}") from error

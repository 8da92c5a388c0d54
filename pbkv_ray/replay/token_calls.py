"""A call of a trace, served by a real engine: its prompt as tokens, its output as long as the trace says."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pbkv_ray.core.calls import Caller
from pbkv_ray.engine.hints import owner_params
from pbkv_ray.engine.requests import cached_tokens
from pbkv_ray.errors import EngineError


@dataclass(frozen=True, slots=True)
class Served:
    """Tokens of the prompt, in all and as found in the tiers; seconds to the first output token."""

    prompt: int
    device: int
    host: int
    first_token_s: float


async def serve_tokens(
    manager: Any, ids: Sequence[int], caller: Caller, output_tokens: int, *, session_id: str | None = None
) -> Served:
    """Through SGLang's tokenizer manager. Raises EngineError for a call that does not end by itself."""
    from sglang.srt.managers.io_struct import GenerateReqInput

    request = GenerateReqInput(
        input_ids=list(ids),
        sampling_params={
            "max_new_tokens": max(1, output_tokens),
            "temperature": 0.0,
            "ignore_eos": True,
            "custom_params": owner_params(caller),
        },
        stream=True,
        session_id=session_id,
    )
    asked, first, meta = time.perf_counter(), 0.0, dict[str, Any]()
    async for output in manager.generate_request(request, None):
        first = first or time.perf_counter() - asked
        meta = output["meta_info"]
    finish = meta.get("finish_reason") or {}
    if finish.get("type") not in ("stop", "length"):
        raise EngineError(
            f"call {caller.step} of run {caller.run_id} ended with {finish or 'nothing'}; nothing was measured"
        )
    return Served(int(meta["prompt_tokens"]), *cached_tokens(meta), first)

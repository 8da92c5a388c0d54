"""What a router needs to know of a call, read from the arguments of the handle call."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pbkv_ray.core.calls import Call, Caller

CHARACTERS_A_TOKEN = 4
MAX_PARTS = 4_096  # of a prompt, beyond which its size is not counted on


@dataclass(frozen=True, slots=True)
class Asked:
    """prompt_tokens is an estimate: a router has no tokenizer.

    begins: it is the run's first call, as far as its caller knows.
    """

    run_id: str
    prompt_tokens: int
    begins: bool = field(default=False, kw_only=True)
    parent_run_id: str | None = field(default=None, kw_only=True)


def asked_of(arguments: Sequence[Any]) -> Asked | None:
    """Of `EngineReplica.stream(call)` and `openai_chat(body, caller, salt)`; None for anything else, and for calls
    that belong to no run."""
    match arguments:
        case [Asked() as asked, *_]:  # a benchmark, which knows its sizes
            return asked
        case [Call() as call, *_]:
            return _asked(call.caller, (len(message.content) for message in call.messages))
        case [Mapping() as body, Caller() as caller, *_]:
            return _asked(caller, _lengths(body.get("messages")))
    return None


def _asked(caller: Caller, lengths: Iterator[int]) -> Asked:
    return Asked(caller.run_id, _tokens(lengths), begins=caller.step <= 1, parent_run_id=caller.parent_run_id)


def _tokens(lengths: Iterator[int]) -> int:
    return max(1, sum(lengths) // CHARACTERS_A_TOKEN)


def _lengths(messages: Any) -> Iterator[int]:
    """Of a foreign request, which may hold anything."""
    for message in messages[:MAX_PARTS] if isinstance(messages, list) else ():
        content = message.get("content") if isinstance(message, Mapping) else None
        if isinstance(content, str):
            yield len(content)
        elif isinstance(content, list):
            for part in content[:MAX_PARTS]:
                text = part.get("text") if isinstance(part, Mapping) else None
                yield len(text) if isinstance(text, str) else 0

"""Reads along in an OpenAI stream: how the call ended and what it cost. The bytes go on as they are, but for what
the caller did not ask for and we did: a chunk of usage, a chunk of cache tiers."""

import json
from dataclasses import replace
from typing import Any

from deployments.http.foreign import Usage, reason_of, tiers_of, usage_of

Json = dict[str, Any]


class ChatStream:
    """`passed` takes the engine's bytes, however they are cut, and gives those that the caller gets."""

    def __init__(self, *, shows_usage: bool, shows_tiers: bool) -> None:
        self._shows_usage = shows_usage
        self._shows_tiers = shows_tiers
        self._pending = b""
        self._usage: Usage | None = None
        self._tiers: tuple[int, int] | None = None
        self.reason: str | None = None

    @property
    def usage(self) -> Usage | None:
        if self._usage is None or self._tiers is None:
            return self._usage
        return replace(self._usage, device_cached_tokens=self._tiers[0], host_cached_tokens=self._tiers[1])

    def passed(self, chunk: bytes) -> bytes:
        *events, self._pending = (self._pending + chunk).split(b"\n\n")
        return b"".join(kept + b"\n\n" for event in events if (kept := self._event(event)) is not None)

    def rest(self) -> bytes:
        """What is left when the engine's stream ended within an event."""
        return self._pending

    def _event(self, event: bytes) -> bytes | None:
        told = _object(event)
        if told is None:
            return event
        if "error" in told:
            self.reason = "error"
            return event
        self.reason = reason_of(told) or self.reason
        self._usage = usage_of(told) or self._usage
        self._tiers = tiers_of(told) or self._tiers
        changed = False
        if told.get("usage") is not None and not self._shows_usage:
            told["usage"] = None
            changed = True
        if told.get("sglext") is not None and not self._shows_tiers:
            told["sglext"] = None
            changed = True
        if not changed:
            return event
        # Clients read choices[0] of every chunk; one without choices comes to those only who asked for it.
        return b"data: " + json.dumps(told, ensure_ascii=False).encode() if told.get("choices") else None


def _object(event: bytes) -> Json | None:
    """A chunk's object; None for [DONE], comments and what is not JSON."""
    if not event.startswith(b"data: {"):
        return None
    try:
        found = json.loads(event[6:])
    except ValueError:
        return None
    return found if isinstance(found, dict) else None

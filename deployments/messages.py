"""LangGraph's message stream in the two forms that the SDK knows: whole messages so far, or (piece, metadata)."""

from collections.abc import Iterator
from typing import Any

from langchain_core.messages import BaseMessage, BaseMessageChunk, message_chunk_to_message

from deployments.encoding import plain
from deployments.service import Json

MAX_OPEN = 256  # messages that are being put together; the oldest is forgotten first


class MessageEvents:
    """Event names and data: "messages" [piece, metadata]; "messages/metadata" {id: ...}, then "messages/partial"
    [message so far] a piece, or "messages/complete" [message] for one that came at once."""

    def __init__(self, *, whole: bool, pairs: bool) -> None:
        self._whole = whole
        self._pairs = pairs
        self._open: dict[str, BaseMessage] = {}

    def of(self, message: BaseMessage, metadata: Json) -> Iterator[tuple[str, Any]]:
        if self._pairs:
            yield "messages", [plain(message), plain(metadata)]
        if not self._whole:
            return
        name = str(message.id)
        if name not in self._open:
            if len(self._open) >= MAX_OPEN:
                del self._open[next(iter(self._open))]
            yield "messages/metadata", {name: {"metadata": plain(metadata)}}
        if isinstance(message, BaseMessageChunk):
            before = self._open.get(name)
            so_far = message if not isinstance(before, BaseMessageChunk) else before + message
            self._open[name] = so_far
            yield "messages/partial", [plain(message_chunk_to_message(so_far))]
        else:
            self._open[name] = message
            yield "messages/complete", [plain(message)]

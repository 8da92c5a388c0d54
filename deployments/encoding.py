"""Graph values to JSON text and requests to stored text and back."""

import json
from dataclasses import asdict, fields
from datetime import UTC, datetime
from typing import Any

from pydantic_core import to_json as pydantic_to_json

from deployments.service import Json, RunRequest


def to_json(value: Any) -> str:
    """JSON text of whatever a graph's state holds: messages, pydantic models, dataclasses, sets, bytes, errors.

    What JSON cannot say is said as text (an unknown object by its repr, NaN as null), since a stream must not
    break on one odd value.
    """
    return pydantic_to_json(
        value, inf_nan_mode="null", bytes_mode="base64", serialize_unknown=True, fallback=_as_text
    ).decode()


def _as_text(value: Any) -> str:
    return f"{type(value).__name__}: {value}" if isinstance(value, BaseException) else repr(value)


def plain(value: Any) -> Any:
    """`value` as JSON types."""
    return json.loads(to_json(value))


def iso(at_s: float) -> str:
    return datetime.fromtimestamp(at_s, UTC).isoformat()


def request_to_text(request: RunRequest) -> str:
    return to_json(asdict(request))


def request_from_text(text: str) -> RunRequest:
    """Fields that another version of ours stored and this one does not know are left out."""
    stored: Json = json.loads(text)
    known = {field.name: stored[field.name] for field in fields(RunRequest) if field.name in stored}
    for name in ("stream_mode", "interrupt_before", "interrupt_after"):
        known[name] = tuple(known.get(name) or ())
    return RunRequest(**known)

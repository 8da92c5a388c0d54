"""Reads a JSON body: its type, its size while it arrives, its depth, and then the fields."""

import math
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from fastapi import Request
from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic_core import from_json

from deployments.http.errors import RefusedError, sentence, shown
from pbkv_ray.errors import InputError

T = TypeVar("T")


def parse_json(data: bytes, max_depth: int) -> Any:
    """`data` as JSON that can be stored and sent on. Raises InputError for what is not, or is nested too deeply."""
    try:
        value = from_json(data, allow_inf_nan=False)
    except ValueError as error:
        if "recursion limit" in str(error):
            raise _too_deep(max_depth) from None
        raise InputError(f"the body is not JSON: {error}; it starts with {shown(data[:40])}") from None
    level = [value]
    depth = 0
    while level:
        if depth > max_depth:
            raise _too_deep(max_depth)
        level = _children(level)
        depth += 1
    return value


def _children(level: list[Any]) -> list[Any]:
    below: list[Any] = []
    for item in level:
        if isinstance(item, dict):
            below.extend(item.keys())
            below.extend(item.values())
        elif isinstance(item, list):
            below.extend(item)
        elif isinstance(item, str):
            if "\0" in item:
                raise InputError(f"the body holds the NUL character, in {shown(item)}; no store keeps it, remove it")
        elif isinstance(item, float) and not math.isfinite(item):
            raise InputError("the body holds a number beyond the range of a double; send it as a string")
    return below


def _too_deep(max_depth: int) -> InputError:
    return InputError(f"the body is nested deeper than {max_depth} levels; flatten it")


async def read_json(request: Request) -> Any:
    """The body. Raises RefusedError 413 and 415, InputError; an empty body is an empty object."""
    data = await request.body()
    if not data:
        return {}
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    # A web page may post any other type to a loopback server without asking; it may not post this one.
    if kind != "application/json" and not kind.endswith("+json"):
        raise RefusedError(415, f"content-type is {shown(kind)}; the body must come as application/json")
    return parse_json(data, request.app.state.options.max_json_depth)


def json_body(kind: type[T]) -> Callable[[Request], Awaitable[T]]:
    """A dependency: the body as `kind`, or an InputError that names the field, its value and the rule."""
    adapter = TypeAdapter(kind)

    async def read(request: Request) -> T:
        value = await read_json(request)
        try:
            return adapter.validate_python(value)
        except ValidationError as error:
            raise InputError(sentence(error.errors(), "the body", value)) from None

    return read


def described(model: type[BaseModel], many: bool = False) -> dict[str, Any]:
    """What /docs says of a body that we read ourselves."""
    schema: dict[str, Any] = model.model_json_schema()
    if many:
        schema = {"type": "array", "items": schema}
    return {"requestBody": {"content": {"application/json": {"schema": schema}}}}

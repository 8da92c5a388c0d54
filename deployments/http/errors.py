"""One answer for every error: a status and a sentence, in the shape that the route's own protocol has for it.

LangGraph's routes answer {"detail": "..."}; OpenAI's answer {"error": {"message", "type", "param", "code"}}.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

from pbkv_ray.errors import InputError, PbkvError, UnavailableError

log = logging.getLogger(__name__)

OPENAI_PATHS = ("/v1/chat/", "/v1/models", "/v1/completions", "/v1/embeddings", "/v1/responses")
_OPENAI_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
_SHOWN = 100


class RefusedError(InputError):
    """A request that is refused with a status of HTTP's own: 401, 405, 413, 415, 421."""

    def __init__(self, status: int, message: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.headers = dict(headers or {})


def shown(value: object) -> str:
    """`value` as a message may carry it: one line, bounded, control characters escaped."""
    text = ascii(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}... ({len(text)} characters)"


def error_response(path: str, status: int, message: str, headers: Mapping[str, str] | None = None) -> Response:
    body: dict[str, Any]
    if path.startswith(OPENAI_PATHS):
        kind = _OPENAI_TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
        body = {"error": {"message": message, "type": kind, "param": None, "code": None}}
    else:
        body = {"detail": message}
    return JSONResponse(body, status_code=status, headers=dict(headers or {}))


def cause_of(error: BaseException) -> BaseException:
    """Ray wraps what a replica raised and puts the traceback in the text; callers get the error itself."""
    cause = getattr(error, "cause", None)
    return cause if isinstance(cause, PbkvError) else error


def answer(path: str, error: PbkvError) -> Response:
    found = cause_of(error)
    status = getattr(found, "status", 500)
    headers: dict[str, str] = dict(getattr(found, "headers", {}))
    if isinstance(found, UnavailableError):
        headers.setdefault("retry-after", "1")
    if status >= 500:
        log.error("%s answered %d: %s", path, status, found)
    return error_response(path, status, str(found), headers)


def sentence(errors: Sequence[Any], what: str, value: object = None) -> str:
    """The most specific of pydantic's errors as a sentence that names the field, its value and the rule."""
    first = max(errors, key=lambda error: len(error["loc"]))
    where = _place(first["loc"], value)
    more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
    if first["type"] == "missing":
        return f"{what} lacks {where!r}; add it (the fields are listed at /docs){more}"
    rule = first["msg"][:1].lower() + first["msg"][1:]
    return f"{what}: {where or 'it'} is {shown(first['input'])}; {rule} (the fields are listed at /docs){more}"


def _place(location: Sequence[str | int], value: object) -> str:
    """Fields and positions only: pydantic's locations also name the branches of a union that it tried."""
    if value is None:  # a parameter of the path or the query; or a body that is null
        return str(location[-1]) if location else ""
    place: list[str] = []
    for number, part in enumerate(location):
        if isinstance(value, dict) and (part in value or number == len(location) - 1):
            value = value.get(part)
        elif isinstance(value, list) and isinstance(part, int) and part < len(value):
            value = value[part]
        else:
            continue
        place.append(str(part))
    return ".".join(place)


def install(app: FastAPI) -> None:
    @app.exception_handler(PbkvError)
    async def ours(request: Request, error: PbkvError) -> Response:
        return answer(request.url.path, error)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        return error_response(request.url.path, 422, sentence(error.errors(), "the request"))

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> Response:
        path = request.url.path
        message = str(error.detail)
        if error.status_code in (404, 405):
            message = f"{request.method} {shown(path)} is not offered here; the routes are listed at /docs"
        return error_response(path, error.status_code, message, error.headers)

    @app.exception_handler(Exception)
    async def bug(request: Request, error: Exception) -> Response:
        log.exception("%s %s failed", request.method, shown(request.url.path), exc_info=error)
        return error_response(request.url.path, 500, "the gateway failed on this request; its log says why")

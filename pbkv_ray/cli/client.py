"""What the commands share: a client of a running application, and errors that say what to do."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import httpx
import typer
from langgraph_sdk import get_client
from langgraph_sdk.client import LangGraphClient
from langgraph_sdk.errors import APIStatusError

from pbkv_ray.errors import InputError, UnavailableError

Url = Annotated[str, typer.Option(envvar="PBKV_URL", help="address of the gateway")]
DEFAULT_URL = "http://127.0.0.1:8000"


def connect(url: str) -> LangGraphClient:
    """The stock client; the key comes from PBKV_API_KEY, if the gateway wants one."""
    import os

    return get_client(url=url, api_key=os.environ.get("PBKV_API_KEY", ""), timeout=(5.0, None, None, None))


@contextmanager
def explained(url: str) -> Iterator[None]:
    """Turns the client's errors into ours, also the first of several that happened at once.

    Raises UnavailableError, InputError.
    """
    try:
        yield
    except (ExceptionGroup, httpx.HTTPError, httpx.InvalidURL, APIStatusError) as error:
        raise _ours(url, _first(error)) from error


def _first(error: Exception) -> Exception:
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return error


def _ours(url: str, error: Exception) -> Exception:
    if isinstance(error, httpx.InvalidURL | httpx.UnsupportedProtocol):
        return InputError(f"--url is {url!r}, which is no address ({error}); write http://HOST:PORT")
    if isinstance(error, httpx.TransportError):
        return UnavailableError(f"nothing answers at {url} ({error}); start it with `pbkv serve`, or name --url")
    if not isinstance(error, APIStatusError | httpx.HTTPStatusError):
        return error
    response = error.response
    try:
        detail = response.json().get("detail", response.text)
    except (ValueError, AttributeError):
        detail = response.text
    kind = InputError if response.status_code < 500 else UnavailableError
    return kind(f"{url} answered {response.status_code}: {detail}")

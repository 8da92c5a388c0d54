"""Reads the files that data sets come in: a JSON list, or JSON lines, either of them gzipped or not."""

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from pbkv_ray.errors import InputError, NotFoundError

SAMPLES: Final = Path(__file__).parent / "samples"


def records(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of the file in order. Raises NotFoundError, and InputError that names the line."""
    if not path.is_file():
        raise NotFoundError(f"{path} is no file")
    if path.name.removesuffix(".gz").endswith(".json"):
        yield from _json_list(path)
    else:
        yield from _json_lines(path)


def field(record: dict[str, Any], name: str, path: Path) -> str:
    """A text that the record must have. Raises InputError."""
    value = record.get(name)
    if not isinstance(value, str) or not value.strip():
        raise InputError(f"a record of {path} has no text {name!r}; it has {', '.join(sorted(record)[:12])}")
    return value


def _json_lines(path: Path) -> Iterator[dict[str, Any]]:
    number = 0
    try:
        with _open(path) as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield _object(json.loads(line), path, number)
    except (ValueError, OSError) as error:
        raise InputError(f"{path}, after line {number}: {error}; one JSON object a line is expected") from error


def _json_list(path: Path) -> Iterator[dict[str, Any]]:
    try:
        with _open(path) as file:
            items = json.load(file)
    except (ValueError, OSError) as error:
        raise InputError(f"{path} is no JSON: {error}") from error
    if not isinstance(items, list):
        raise InputError(f"{path} holds a {type(items).__name__}; a JSON list is expected")
    for number, item in enumerate(items, start=1):
        yield _object(item, path, number)


def _object(item: Any, path: Path, number: int) -> dict[str, Any]:
    if not isinstance(item, dict):
        raise InputError(f"{path}, record {number} is a {type(item).__name__}; an object is expected")
    return item


def _open(path: Path) -> Any:
    return gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8")

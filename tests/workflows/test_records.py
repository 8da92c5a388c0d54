"""Data set files: lists and lines, gzipped or not; a fault names its place."""

import gzip
import json

import pytest

from pbkv_ray.errors import InputError, NotFoundError
from workflows.records import records


@pytest.mark.parametrize("name", ["a.json", "a.json.gz", "a.jsonl", "a.jsonl.gz"])
def test_a_list_and_lines_read_the_same(tmp_path, name: str) -> None:
    items = [{"a": 1}, {"b": "ü"}]
    text = json.dumps(items) if ".jsonl" not in name else "\n".join(map(json.dumps, items))
    path = tmp_path / name
    path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    assert list(records(path)) == items


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("a.jsonl", '{"a": 1}\n{"a":\n', "after line 2"),
        ("a.jsonl", "[1]\n", "record 1 is a list; an object is expected"),
        ("a.json", '{"a": 1}', "holds a dict; a JSON list is expected"),
        ("a.json", "[", "is no JSON"),
        ("a.jsonl.gz", '{"a": 1}', "Not a gzipped file"),
    ],
)
def test_a_file_of_another_form_is_refused(tmp_path, name: str, text: str, says: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(InputError, match=says):
        list(records(tmp_path / name))


def test_a_missing_file_is_not_found(tmp_path) -> None:
    with pytest.raises(NotFoundError, match="is no file"):
        list(records(tmp_path / "absent.json"))

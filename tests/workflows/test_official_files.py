"""The data sets' own files, where this machine has them (PBKV_DATA, or ../shared/data beside the repository)."""

import os
from pathlib import Path

import pytest

from workflows.registry import REGISTRY

DATA = Path(os.environ.get("PBKV_DATA") or Path(__file__).parents[2].parent / "shared" / "data")


@pytest.mark.parametrize(
    ("name", "file", "count"),
    [
        ("hover", "hover_dev.jsonl.gz", 4_000),
        ("swe", "swebench_lite_issues.jsonl.gz", 300),
        ("finance", "financebench_open150.jsonl.gz", 150),
    ],
)
def test_every_record_becomes_a_valid_input(name: str, file: str, count: int) -> None:
    if not (DATA / file).is_file():
        pytest.skip(f"{file} is not in {DATA}; set PBKV_DATA to the folder that holds it")
    spec = REGISTRY[name]
    assert len([spec.checked(data) for data in spec.read(DATA / file)]) == count

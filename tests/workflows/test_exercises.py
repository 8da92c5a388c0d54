"""Exercises that are made: all different, all broken as they say, all possible to repair."""

from pathlib import Path

import pytest

from pbkv_ray.errors import InputError
from workflows import swe
from workflows.exercises import EVERY, exercises, main


def fails(files: dict[str, str]) -> bool:
    """Whether the tests of an exercise fail, in this process: these programs are ours."""
    programs = {name: text for name, text in files.items() if name.endswith(".py")}
    (test,) = (text for name, text in programs.items() if name.startswith("test_"))
    ((module, code),) = ((name, text) for name, text in programs.items() if not name.startswith("test_"))
    space: dict[str, object] = {}
    exec(code, space)
    exec(test.replace(f"from {module.removesuffix('.py')} import ", "# "), space)
    (run,) = (value for name, value in space.items() if name.startswith("test_"))
    try:
        run()  # type: ignore[operator]
    except (AssertionError, IndexError):
        return True
    return False


def test_a_folder_of_exercises_is_what_the_workflow_reads(tmp_path: Path) -> None:
    main(tmp_path, count=30)
    inputs = list(swe.read(tmp_path))
    assert len({one["statement"] for one in inputs}) == 30
    assert all(swe.SPEC.checked(one)["files"] and swe.SPEC.checked(one)["tests"] for one in inputs)


def test_every_exercise_is_different_and_broken() -> None:
    made = list(exercises(len(EVERY)))
    assert len({tuple(sorted(files.items())) for files in made}) == len(EVERY) > 1_000
    assert list(exercises(5)) == made[:5]
    assert [files["statement.txt"] for files in made if not fails(files)] == []


@pytest.mark.parametrize(
    ("module", "wrong", "right"),
    [
        ("distance_7.py", "a - b", "abs(a - b)"),
        ("is_sorted_7.py", "items[-1] >= items[-2]", "items == sorted(items)"),
        ("mean_7.py", "sum(values)", "sum(values) / len(values)"),
        ("without_7.py", "if 7", "while 7"),
        ("is_leap_7.py", "year % 4 == 0", "year % 4 == 0 and (year % 100 != 0 or year % 400 == 0)"),
    ],
)
def test_a_repaired_program_passes(module: str, wrong: str, right: str) -> None:
    (files,) = (files for files in exercises(len(EVERY)) if module in files)
    assert not fails({**files, module: files[module].replace(wrong, right)})


def test_too_many_are_refused() -> None:
    with pytest.raises(InputError, match=r"exercises are too many; \d+ different ones can be made"):
        list(exercises(1_000_000))

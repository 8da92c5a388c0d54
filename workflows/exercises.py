"""Makes exercises for `swe`: small broken programs of our own with their tests, as many different ones as are wanted.

    python -m workflows.exercises FOLDER --count 300

Each is a folder that `pbkv submit swe --file FOLDER` reads. Faults of the same kind differ in names and numbers.
"""

import random
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from pbkv_ray.errors import InputError


@dataclass(frozen=True, slots=True)
class Kind:
    """A fault. Texts are templates of {f} (the function's name), {k} (a number) and values computed from {k}."""

    names: str
    statement: str
    code: str
    test: str  # body of the test, one assertion a line


KINDS = (
    Kind(
        "add total plus combine join_up sum_of both together",
        "{f}({k}, 3) returns {k_less_3}. It must return the sum of both numbers.",
        "def {f}(a, b):\n    return a - b\n",
        "{f}({k}, 3) == {k_plus_3}\n{f}(-1, 1) == 0",
    ),
    Kind(
        "is_even even divides_by_two halves pairs_up",
        "{f}({k_twice}) returns False. It must be True for even numbers.",
        "def {f}(n):\n    return n % 2 == 1\n",
        "{f}({k_twice})\nnot {f}({k_twice_1})",
    ),
    Kind(
        "larger biggest most upper best_of winner",
        "{f}({k}, {k_plus_3}) returns {k}. It must return the larger of both numbers.",
        "def {f}(a, b):\n    if a > b:\n        return b\n    return a\n",
        "{f}({k}, {k_plus_3}) == {k_plus_3}\n{f}({k_plus_3}, {k}) == {k_plus_3}",
    ),
    Kind(
        "smaller least lowest cheaper loser",
        "{f}({k}, {k_plus_3}) returns {k_plus_3}. It must return the smaller of both numbers.",
        "def {f}(a, b):\n    return max(a, b)\n",
        "{f}({k}, {k_plus_3}) == {k}\n{f}(5, 5) == 5",
    ),
    Kind(
        "last tail final newest latest",
        "{f}([{k}, 2, {k_plus_3}]) returns {k}. It must return the last item.",
        "def {f}(items):\n    return items[0]\n",
        "{f}([{k}, 2, {k_plus_3}]) == {k_plus_3}\n{f}(['a']) == 'a'",
    ),
    Kind(
        "first head oldest front",
        "{f}([{k}, 2, {k_plus_3}]) returns {k_plus_3}. It must return the first item.",
        "def {f}(items):\n    return items[-1]\n",
        "{f}([{k}, 2, {k_plus_3}]) == {k}\n{f}(['a']) == 'a'",
    ),
    Kind(
        "square squared area times_itself",
        "{f}({k_plus_3}) returns {twice_k_plus_3}. It must return the number times itself.",
        "def {f}(x):\n    return x + x\n",
        "{f}({k_plus_3}) == {k_plus_3} * {k_plus_3}\n{f}(-2) == 4",
    ),
    Kind(
        "times scale multiply grow stretch",
        "{f}(10) returns {k_plus_10}. It must multiply the number by {k}.",
        "def {f}(x):\n    return x + {k}\n",
        "{f}(10) == {k_times_10}\n{f}(0) == 0",
    ),
    Kind(
        "shift move raise_by offset later",
        "{f}(10) returns {k_times_10}. It must add {k} to the number.",
        "def {f}(x):\n    return x * {k}\n",
        "{f}(10) == {k_plus_10}\n{f}(0) == {k}",
    ),
    Kind(
        "reaches passes at_least allowed full",
        "{f}({k}) returns False. It must be True from {k} on.",
        "def {f}(n):\n    return n > {k}\n",
        "{f}({k})\n{f}({k_plus_3})\nnot {f}({k} - 1)",
    ),
    Kind(
        "seconds to_seconds in_seconds",
        "{f}({k}) returns {k_times_10}. It must turn minutes into seconds: 60 a minute.",
        "def {f}(minutes):\n    return minutes * 10\n",
        "{f}({k}) == {k} * 60\n{f}(0) == 0",
    ),
    Kind(
        "reverse backwards mirrored flipped",
        "{f}('abc{k}') returns 'abc{k}'. It must return the text backwards.",
        "def {f}(text):\n    return text\n",
        "{f}('abc{k}') == 'abc{k}'[::-1]\n{f}('') == ''",
    ),
    Kind(
        "mean average middle typical",
        "{f}([{k}, {k}, 0, 0]) returns {k_twice}. It must return the average.",
        "def {f}(values):\n    return sum(values)\n",
        "{f}([{k}, {k}, 0, 0]) == {k} / 2\n{f}([5]) == 5",
    ),
    Kind(
        "factorial product_to arrangements",
        "{f}(3) returns 0. It must return 1 * 2 * 3; the case {k} must work too.",
        "def {f}(n):\n    result = 0\n    for i in range(1, n + 1):\n        result = result * i\n    return result\n",
        "{f}(3) == 6\n{f}(0) == 1\n{f}({k}) == {k} * {f}({k} - 1)",
    ),
    Kind(
        "sum_to up_to triangle count_up",
        "{f}({k}) leaves {k} out. It must add all numbers from 1 to {k}, {k} included.",
        "def {f}(n):\n    return sum(range(1, n))\n",
        "{f}({k}) == {k} * ({k} + 1) // 2\n{f}(1) == 1",
    ),
    Kind(
        "count_vowels vowels sung_letters",
        "{f}('banana' * {k}) returns 1. It must count all vowels.",
        "def {f}(text):\n"
        "    count = 0\n"
        "    for letter in text:\n"
        "        if letter in 'aeiou':\n"
        "            count = 1\n"
        "    return count\n",
        "{f}('banana' * {k}) == 3 * {k}\n{f}('') == 0",
    ),
    Kind(
        "is_leap leap_year long_year",
        "{f}({k}00) is wrong when 400 does not divide the year. Years that 100 divides are leap years "
        "only if 400 divides them.",
        "def {f}(year):\n    return year % 4 == 0\n",
        "{f}(2024)\n{f}(2000)\nnot {f}(1900)\nnot {f}(2023)\n{f}({k}00) == ({k}00 % 400 == 0)",
    ),
    Kind(
        "clamp limited capped at_most",
        "{f}({k_plus_10}) returns {k_plus_10}. It must not return more than {k}.",
        "def {f}(x):\n    return x\n",
        "{f}({k_plus_10}) == {k}\n{f}(1) == 1",
    ),
    Kind(
        "distance gap difference apart",
        "{f}({k}, {k_plus_10}) returns -10. It must never be negative.",
        "def {f}(a, b):\n    return a - b\n",
        "{f}({k}, {k_plus_10}) == 10\n{f}({k_plus_10}, {k}) == 10",
    ),
    Kind(
        "loud shout upper_case capitals",
        "{f}('stop {k}') returns 'stop {k}'. It must return capital letters.",
        "def {f}(text):\n    return text.lower()\n",
        "{f}('stop {k}') == 'STOP {k}'\n{f}('') == ''",
    ),
    Kind(
        "without drop remove_all cleaned",
        "{f}([1, {k}, 2, {k}]) returns [1, 2, {k}]. It must remove every {k}.",
        "def {f}(items):\n    items = list(items)\n    if {k} in items:\n        items.remove({k})\n    return items\n",
        "{f}([1, {k}, 2, {k}]) == [1, 2] if {k} > 2 else True\n{f}([]) == []\n{f}([{k}, {k}, {k}]) == []",
    ),
    Kind(
        "is_sorted ordered ascending",
        "{f}([{k}, 1, 2]) returns True. It must be True only when no item is smaller than the one before it.",
        "def {f}(items):\n    return items[-1] >= items[-2]\n",
        "not {f}([{k_plus_3}, 1, 2])\n{f}([1, 2, {k_plus_3}])\n{f}([])",
    ),
)


EVERY = tuple((kind, name, k) for kind in KINDS for name in kind.names.split() for k in range(2, 20))


def exercises(count: int, seed: int = 0) -> Iterator[dict[str, str]]:
    """File name -> text of `count` different exercises. InputError when so many cannot be made."""
    if count > len(EVERY):
        raise InputError(f"{count} exercises are too many; {len(EVERY)} different ones can be made")
    every = list(EVERY)
    random.Random(seed).shuffle(every)
    for kind, name, k in every[:count]:
        values = {
            "f": name,
            "k": k,
            "k_plus_3": k + 3,
            "k_less_3": k - 3,
            "k_plus_10": k + 10,
            "k_times_10": k * 10,
            "k_twice": 2 * k,
            "k_twice_1": 2 * k + 1,
            "twice_k_plus_3": 2 * (k + 3),
        }
        asserts = "".join(f"    assert {line}\n" for line in kind.test.format(**values).splitlines())
        yield {
            "statement.txt": kind.statement.format(**values) + "\n",
            f"{name}_{k}.py": kind.code.format(**values),
            f"test_{name}_{k}.py": f"from {name}_{k} import {name}\n\n\ndef test_{name}():\n{asserts}",
        }


def main(
    folder: Path,
    count: Annotated[int, typer.Option(min=1)] = 300,
    seed: int = 0,
) -> None:
    """Write exercises into FOLDER, one a folder."""
    for number, files in enumerate(exercises(count, seed)):
        target = folder / f"{number:04d}"
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir(parents=True)
        for name, text in files.items():
            (target / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)

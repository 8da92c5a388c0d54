"""Loops that numpy cannot say in whole arrays, compiled by numba."""

from collections.abc import Callable
from typing import TypeVar

import numba

Loop = TypeVar("Loop", bound=Callable[..., object])


def compiled(loop: Loop) -> Loop:
    """`loop` as machine code: made at its first call (seconds), then kept in `__pycache__` beside the source file, or
    in the user's cache folder, for later processes. Array indices are not checked."""
    try:
        return numba.njit(cache=True, error_model="numpy")(loop)
    except RuntimeError:  # no folder can be written to: every process compiles for itself
        return numba.njit(error_model="numpy")(loop)

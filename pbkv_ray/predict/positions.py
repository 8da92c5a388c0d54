"""Where a run is, for `predict.counts`."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt


class ContextPath(NamedTuple):
    """The contexts of one position: their rows [family, length], and the column of the current agent."""

    rows: npt.NDArray[np.intp]
    current: int


class Position(NamedTuple):
    """Where a run is, as far as contexts go; its next call makes the next position from it alone."""

    recent: tuple[int, ...]  # the last `order` columns, the begin included
    visits: tuple[tuple[int, int], ...]  # the last visits: (column, calls)
    visited: dict[int, int]  # column -> visits so far; never mutated
    paths: tuple[ContextPath, ...]  # of this position and of those before it, newest first

"""Tables whose rows are given out and given back: numpy arrays of one row for each of something that comes and goes."""

import heapq
from typing import TypeVar

import numpy as np
import numpy.typing as npt


class Rows:
    """Row numbers of a growing table. Row 0 is never given out; the lowest free one is given first."""

    def __init__(self) -> None:
        self.high = 1
        self._free: list[int] = []

    @property
    def taken(self) -> int:
        return self.high - 1 - len(self._free)

    def take(self) -> int:
        if self._free:
            return heapq.heappop(self._free)
        self.high += 1
        return self.high - 1

    def give(self, row: int) -> None:
        heapq.heappush(self._free, row)


_T = TypeVar("_T", bound=np.generic)


def room(table: npt.NDArray[_T], row: int) -> npt.NDArray[_T]:
    """The table with at least `row + 1` rows: doubled, zeros behind."""
    if row < len(table):
        return table
    bigger = np.zeros((max(row + 1, 2 * len(table)), *table.shape[1:]), table.dtype)
    bigger[: len(table)] = table
    return bigger

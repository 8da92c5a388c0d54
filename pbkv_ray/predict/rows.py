"""Where `predict.counts` keeps the counts of one workflow: one row per context, found by the context's key."""

from typing import Any

import numpy as np
import numpy.typing as npt

from pbkv_ray.predict import kernels


class Rows:
    """Arrays that grow by doubling. Row 0 stays empty: it stands for a context that a history does not have.

    counts: [rows, horizon, columns] what followed, step by step; totals: [rows, horizon] its sums over the columns;
    keys [rows] and lengths [rows]: of the contexts, a length being the place within its family.
    """

    def __init__(self, horizon: int) -> None:
        self.used = 1
        self.counts = np.zeros((64, horizon, 8), np.float32)
        self.totals = np.zeros((64, horizon), np.float32)
        self.keys = np.zeros(64, np.uint64)
        self.lengths = np.zeros(64, np.int32)
        self.slots = np.zeros(128, np.int32)  # hash table of rows; at least twice as long as `keys`

    def __len__(self) -> int:
        return self.used - 1

    @property
    def cells(self) -> int:
        """Memory held, in numbers of four bytes."""
        return sum(a.nbytes for a in (self.counts, self.totals, self.keys, self.lengths, self.slots)) // 4

    @property
    def width(self) -> int:
        """Counts of one context."""
        return self.counts.shape[1] * self.counts.shape[2]

    def widen(self, columns: int) -> None:
        """At least so many `columns`."""
        rows, horizon, width = self.counts.shape
        while width < columns:
            width *= 2
        if width > self.counts.shape[2]:
            counts = np.zeros((rows, horizon, width), np.float32)
            counts[: self.used, :, : self.counts.shape[2]] = self.counts[: self.used]
            self.counts = counts

    def place(self, columns: kernels.Ints, order: int, visits: int, shape: tuple[int, int, int]) -> kernels.Ints:
        """`kernels.place`; `shape` is that of its rows [steps, families, lengths]."""
        rows = np.empty(shape, np.int32)
        most = self.used + rows.size
        if most > len(self.keys):
            self.keys, self.lengths = _longer(self.keys, most), _longer(self.lengths, most)
            self._fill()
        self.used = kernels.place(columns, order, visits, self.slots, self.keys, self.lengths, self.used, rows)
        if self.used > len(self.counts):
            self.counts, self.totals = _longer(self.counts, self.used), _longer(self.totals, self.used)
        return rows

    def shrink(self, most: int) -> int:
        """Halve all counts, and forget all but `most` contexts, those seen least; returns how many are gone."""
        # A suffix is seen at least as often as what it is a suffix of, and comes first among equals.
        order = np.lexsort((self.lengths[1 : self.used], -self.totals[1 : self.used, 0]))[:most]
        rows = np.concatenate(([0], 1 + order))
        gone, self.used = self.used - len(rows), len(rows)
        self.counts, self.totals = _longer(self.counts[rows] / 2, self.used), _longer(self.totals[rows] / 2, self.used)
        self.keys, self.lengths = _longer(self.keys[rows], self.used), _longer(self.lengths[rows], self.used)
        self._fill()
        return gone

    def _fill(self) -> None:
        self.slots = np.zeros(1 << (2 * len(self.keys) - 1).bit_length(), np.int32)
        kernels.fill(self.slots, self.keys, self.used)


def _longer(array: npt.NDArray[Any], most: int) -> npt.NDArray[Any]:
    """`array` at twice its length, or more where `most` does not fit. The new part takes no memory until it is used."""
    longer = np.zeros((max(2 * len(array), most), *array.shape[1:]), array.dtype)
    longer[: len(array)] = array
    return longer

"""Where a run is, for `predict.counts`."""

from typing import NamedTuple


class ContextPath(NamedTuple):
    """The contexts of one position: their rows, family by family from the shortest to the longest (0: none of that
    length), and the column of the current agent."""

    rows: list[int]
    current: int


class Position(NamedTuple):
    """Where a run is, as far as contexts go; its next call makes the next position from it alone."""

    suffixes: list[int]  # keys of the run's last 0, 1, ... agents, the begin included
    visits: tuple[tuple[int, int], ...]  # the last visits: (column, calls)
    visited: dict[int, int]  # column -> visits so far; never mutated
    paths: tuple[ContextPath, ...]  # of this position and of those before it, newest first

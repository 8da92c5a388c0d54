"""The loops of `predict.counts`, compiled: which contexts a history has, what they expect, how they learn.

Histories are agents' columns, END's being 0. A context's key is a hash of what it is made of, the same in every
process; 0 stands for no context. `slots` is an open-addressing table of rows: row 0 stays empty and means none.
"""

import math

import numpy as np
import numpy.typing as npt

from pbkv_ray.predict.compiled import compiled

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int32]
Keys = npt.NDArray[np.uint64]
Ends = npt.NDArray[np.int64]

BEGIN = 1 << 30  # beyond all columns: what stands before a run's first agent
FLOOR = 1e-6  # least probability of a family before mixing
# What the keys of each family start from.
_SUFFIX, _VISITS, _VISITED = (np.uint64(tag) for tag in (0x243F6A8885A308D3, 0x13198A2E03707344, 0xA4093822299F31D0))


@compiled
def _extended(key: np.uint64, value: int) -> np.uint64:
    mixed = (key ^ np.uint64(value)) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(32))) * np.uint64(0xD6E8FEB86659FD93)
    return mixed ^ (mixed >> np.uint64(32))


@compiled
def contexts(columns: Ints, calls: int, order: int, visits: int, keys: Keys) -> None:
    """Fill `keys` [families, lengths]: the contexts after the first `calls` of `columns`, each family's from its
    shortest."""
    for family in range(keys.shape[0]):
        for length in range(keys.shape[1]):
            keys[family, length] = 0
    key = _SUFFIX
    keys[0, 0] = key
    for length in range(1, min(order, calls + 1) + 1):
        key = _extended(key, columns[calls - length] if length <= calls else BEGIN)
        keys[0, length] = key
    if not visits:
        return
    for family in range(1, 3):
        for length in range(2):
            keys[family, length] = keys[0, length]
    current = columns[calls - 1] if calls else BEGIN
    at = calls - 1
    while at >= 0 and columns[at] == current:
        at -= 1
    stayed = calls - 1 - at
    key = _extended(_extended(_VISITS, current), stayed)
    keys[1, 2] = key
    often = 1 if calls else 0  # visits of the current agent
    earlier = 0
    while calls and at >= -1:
        # An earlier visit ends here, or the run began after it.
        agent = columns[at] if at >= 0 else BEGIN
        if earlier < visits:
            earlier += 1
            key = _extended(key, agent)
            keys[1, 2 + earlier] = key
        if agent == current:
            often += 1
        at -= 1
        while at >= 0 and columns[at] == agent:
            at -= 1
    key = _extended(_extended(_VISITED, current), often)
    keys[2, 2] = key
    keys[2, 3] = _extended(key, stayed)


@compiled
def _slot(slots: Ints, keys: Keys, key: np.uint64) -> np.int64:
    """Where in `slots` the row of `key` is, or would be."""
    last = len(slots) - 1
    at = np.int64(key & np.uint64(last))
    while slots[at] and keys[slots[at]] != key:
        at = (at + 1) & last
    return at


@compiled
def fill(slots: Ints, keys: Keys, used: int) -> None:
    """Enter rows 1 to `used` - 1 in `slots`, which is empty."""
    for row in range(1, used):
        slots[_slot(slots, keys, keys[row])] = row


@compiled
def after(width: int, slots: Ints, keys: Keys) -> Ints:
    """[width] for each column, the row of the context that is a call of its agent and no more."""
    rows = np.zeros(width, np.int32)
    for column in range(1, width):
        rows[column] = slots[_slot(slots, keys, _extended(_SUFFIX, column))]
    return rows


@compiled
def place(
    columns: Ints,
    order: int,
    visits: int,
    slots: Ints,
    keys: Keys,
    lengths: Ints,
    used: int,
    rows: Ints,
) -> int:
    """Fill `rows` [steps, families, lengths]: of the contexts after the whole history, after all but its last call,
    and so on. Contexts that are new get the next rows; returns how many rows are used then."""
    found = np.empty(rows.shape[1:], np.uint64)
    for step in range(len(rows) - 1, -1, -1):
        contexts(columns, len(columns) - step, order, visits, found)
        for family in range(rows.shape[1]):
            for length in range(rows.shape[2]):
                key, row = found[family, length], 0
                if key:
                    at = _slot(slots, keys, key)
                    row = slots[at]
                    if not row:
                        row = used
                        slots[at], keys[row], lengths[row] = row, key, length
                        used += 1
                rows[step, family, length] = row
    return used


@compiled
def _expect(
    rows: Ints, first: int, begin: int, counts: Floats, totals: Floats, base: Floats, strength: Floats, expected: Floats
) -> None:
    """Fill `expected` [families, steps, columns]: what each family of contexts expects, from step `begin` and from its
    length `first` on; `base` [horizon, columns] before anything was counted.

    From the shortest context to the longest: each weighs what it has counted against what the shorter ones expect.
    The columns are those of `counts`, unused ones included: a multiple of eight fits vector registers.
    """
    families, steps, width = expected.shape
    one = np.float32(1.0)
    for step in range(steps):
        for column in range(width):
            expected[0, step, column] = base[begin + step, column]
    for family in range(families):
        for length in range(2 if family else first, rows.shape[1]):
            if family == 0 and length == 2:
                _share(expected)
            row = rows[family, length]
            if row:
                for step in range(steps):
                    share = one / (totals[row, begin + step] + strength[length])
                    left = strength[length] * share
                    for column in range(width):
                        counted = share * counts[row, begin + step, column]
                        expected[family, step, column] = left * expected[family, step, column] + counted


@compiled
def _share(expected: Floats) -> None:
    """The families have their two shortest contexts in common."""
    for family in range(1, expected.shape[0]):
        for step in range(expected.shape[1]):
            for column in range(expected.shape[2]):
                expected[family, step, column] = expected[0, step, column]


@compiled
def expect(
    columns: Ints,
    ends: Ends,
    order: int,
    visits: int,
    first: int,
    slots: Ints,
    keys: Keys,
    counts: Floats,
    totals: Floats,
    base: Floats,
    strength: Floats,
    expected: Floats,
) -> None:
    """Fill `expected` [runs, families, steps, columns]. The histories lie one after the other in `columns`, each up to
    its number in `ends`."""
    found = np.empty((expected.shape[1], len(strength)), np.uint64)
    rows = np.empty(found.shape, np.int32)
    begin = 0
    for run in range(len(ends)):
        history = columns[begin : ends[run]]
        begin = ends[run]
        contexts(history, len(history), order, visits, found)
        for family in range(found.shape[0]):
            for length in range(found.shape[1]):
                key = found[family, length]
                rows[family, length] = slots[_slot(slots, keys, key)] if key else 0
        current = history[-1] if len(history) else 0
        _expect(rows, first, 0, counts, totals, base[current], strength, expected[run])


@compiled
def mix(logs: Floats, weight: Doubles, mixed: Floats) -> None:
    """Fill `mixed` [runs, steps, columns] from `logs` [runs, families, steps, columns]: log-linear, not normalised."""
    runs, families, steps, width = logs.shape
    for run in range(runs):
        for step in range(steps):
            for column in range(width):
                mixed[run, step, column] = 0.0
            for family in range(families):
                share = np.float32(weight[family, step])
                for column in range(width):
                    mixed[run, step, column] += share * logs[run, family, step, column]


@compiled
def normalise(likely: Floats, out: Doubles) -> None:
    """Fill `out` [runs, steps, columns in use] from `likely` [runs, steps, columns], END's column last."""
    runs, steps, width = out.shape
    for run in range(runs):
        for step in range(steps):
            mass = 0.0
            for column in range(width):
                mass += likely[run, step, column]
            share = 1.0 / mass
            out[run, step, width - 1] = likely[run, step, 0] * share
            for column in range(1, width):
                out[run, step, column - 1] = likely[run, step, column] * share


@compiled
def weigh(
    rows: Ints,
    first: int,
    step: int,
    column: int,
    width: int,
    counts: Floats,
    totals: Floats,
    base: Floats,
    strength: Floats,
    weight: Doubles,
    slope: Doubles,
    rate: float,
) -> None:
    """One gradient step for the families' weights of `step`, on the log-likelihood of `column` among `width`; `rows`
    [families, lengths], `base` [horizon, columns]."""
    families = len(weight)
    expected = np.empty((families, 1, counts.shape[2]), np.float32)
    _expect(rows, first, step, counts, totals, base, strength, expected)
    logs, likely, mass = np.empty((families, width)), np.empty(width), 0.0
    for other in range(width):
        mixed = 0.0
        for family in range(families):
            logs[family, other] = math.log(max(expected[family, 0, other], FLOOR))
            mixed += weight[family, step] * logs[family, other]
        likely[other] = math.exp(mixed)
        mass += likely[other]
    for family in range(families):
        gradient = logs[family, column]
        for other in range(width):
            gradient -= logs[family, other] * likely[other] / mass
        # The sum forgets, so that the weights keep following what runs do.
        slope[family, step] = 0.999 * slope[family, step] + gradient**2
        weight[family, step] += rate * gradient / math.sqrt(slope[family, step])
        weight[family, step] = min(max(weight[family, step], -0.5), 2.0)


@compiled
def count(rows: Ints, column: int, counts: Floats, totals: Floats) -> None:
    """After each step's contexts `rows` [steps, families, lengths] came `column`."""
    for step in range(rows.shape[0]):
        for family in range(rows.shape[1]):
            # The families have their two shortest contexts in common.
            for length in range(2 if family else 0, rows.shape[2]):
                row = rows[step, family, length]
                if row:
                    counts[row, step, column] += 1.0
                    totals[row, step] += 1.0

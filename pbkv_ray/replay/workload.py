"""A workload: runs of LLM calls whose prompts are known as prefix-chained block ids, without any text.

A block is 16 prompt tokens; the same id means the same whole prompt up to and with that block. A replay makes
16 pseudo-random tokens of each id, so any engine and tokenizer sees the prefix structure of the original.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from pbkv_ray.errors import InputError

BLOCK_TOKENS = 16
Ids = npt.NDArray[np.int64]
Tokens = npt.NDArray[np.int32]
Half = Literal["tune", "report", "all"]


@dataclass(frozen=True, slots=True, eq=False)
class TraceCall:
    """One LLM call. `spans` are [start, count] runs of block ids that cover the prompt's first full blocks.

    The prompt may be longer than its spans say (a private rest that the trace has no ids for, and always the
    tail of `prompt_tokens % 16`). `wait_s` is the time between the previous call's end and this call's
    arrival (tool, human), `at_s` the arrival since the run's start; None where the trace does not say.
    """

    agent: str
    session: int
    prompt_tokens: int
    output_tokens: int
    spans: tuple[tuple[int, int], ...]
    at_s: float | None = None
    wait_s: float | None = None

    def blocks(self) -> Ids:
        """[n] int64 block ids, first to last."""
        if not self.spans:
            return np.empty(0, np.int64)
        return np.concatenate([np.arange(start, start + count, dtype=np.int64) for start, count in self.spans])

    @property
    def known_blocks(self) -> int:
        return sum(count for _, count in self.spans)


@dataclass(frozen=True, slots=True, eq=False)
class TraceRun:
    """One run. Runs of one `instance` (the task that was solved) never fall on both sides of a split."""

    run_id: str
    instance: str
    workflow: str
    calls: tuple[TraceCall, ...]
    start_s: float | None = None
    tags: dict[str, str] = field(default_factory=dict)

    @property
    def agents(self) -> tuple[str, ...]:
        return tuple(call.agent for call in self.calls)

    @property
    def prompt_tokens(self) -> int:
        return sum(call.prompt_tokens for call in self.calls)

    @property
    def footprint_tokens(self) -> int:
        """Unique prompt tokens of the run: what an endless cache would hold of it."""
        spans = sorted(span for call in self.calls for span in call.spans)
        covered, reach = 0, -1
        for start, count in spans:
            covered += max(0, start + count - max(start, reach))
            reach = max(reach, start + count)
        return covered * BLOCK_TOKENS


@dataclass(frozen=True, slots=True, eq=False)
class Workload:
    name: str
    runs: tuple[TraceRun, ...]
    in_flight: int = 16  # runs at once that the trace's own statistics assume

    def __len__(self) -> int:
        return len(self.runs)

    @property
    def prompt_tokens(self) -> int:
        return sum(run.prompt_tokens for run in self.runs)

    @property
    def footprint_tokens(self) -> float:
        """Mean over the runs; times the runs in flight it is the live footprint, of which pools are fractions."""
        if not self.runs:
            raise InputError(f"workload {self.name!r} has no runs; loosen the filters")
        return sum(run.footprint_tokens for run in self.runs) / len(self.runs)

    def pool_tokens(self, fraction: float, concurrency: int) -> int:
        return int(self.footprint_tokens * concurrency * fraction)

    def where(self, keep: Callable[[TraceRun], bool]) -> "Workload":
        return replace(self, runs=tuple(run for run in self.runs if keep(run)))

    def half(self, which: Half) -> "Workload":
        """Split by instance, by a hash: the same on every machine, whatever else is filtered."""
        if which == "all":
            return self
        return self.where(lambda run: (_hash("half", run.instance) % 2 == 0) == (which == "tune"))

    def cut(self, runs: int | None, seed: int = 0) -> "Workload":
        """The first `runs` runs in an order shuffled by `seed`; None keeps all. A shorter cut is a prefix."""
        shuffled = sorted(self.runs, key=lambda run: _hash(str(seed), run.run_id))
        return replace(self, runs=tuple(shuffled[:runs]))

    def max_output(self, tokens: int | None) -> "Workload":
        """Cuts every output to `tokens`, so that a replay on a CPU is mostly prefill, as on a GPU."""
        if tokens is None:
            return self
        return replace(self, runs=tuple(map_calls(self.runs, lambda c: min(c.output_tokens, tokens))))

    def max_prompt(self, tokens: int | None) -> "Workload":
        """Drops the runs with a prompt above `tokens`: no engine with such a pool would take them."""
        if tokens is None:
            return self
        return self.where(lambda run: all(call.prompt_tokens <= tokens for call in run.calls))

    def calls(self) -> Iterator[tuple[TraceRun, TraceCall]]:
        for run in self.runs:
            for call in run.calls:
                yield run, call


def map_calls(runs: Sequence[TraceRun], output: Callable[[TraceCall], int]) -> Iterator[TraceRun]:
    for run in runs:
        yield replace(run, calls=tuple(replace(call, output_tokens=output(call)) for call in run.calls))


def _hash(*parts: str) -> int:
    return int.from_bytes(hashlib.sha256("\0".join(parts).encode()).digest()[:8], "big")


def block_tokens(ids: Ids, vocabulary: int) -> Tokens:
    """[16 * n] int32 in 1 .. vocabulary - 1, sixteen tokens a block id: SplitMix64 of the id alone."""
    if vocabulary < 3:
        raise InputError(f"a vocabulary of {vocabulary} tokens cannot tell blocks apart; use at least 3")
    x = (ids.astype(np.uint64)[:, None] * np.uint64(BLOCK_TOKENS) + np.arange(BLOCK_TOKENS, dtype=np.uint64)).ravel()
    with np.errstate(over="ignore"):
        x = (x + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        x ^= x >> np.uint64(31)
    return (x % np.uint64(vocabulary - 1)).astype(np.int32) + 1


def prompt_tokens(call: TraceCall, vocabulary: int, private: int) -> Tokens:
    """[call.prompt_tokens] int32: the known blocks' tokens, then a rest made from the seed `private`.

    Give every (run, call) its own `private`, and two calls never share more than the trace says.
    """
    known = block_tokens(call.blocks(), vocabulary)[: call.prompt_tokens]
    rest = call.prompt_tokens - len(known)
    if not rest:
        return known
    first = PRIVATE_BASE + private * PRIVATE_STRIDE
    ids = np.arange(first, first + -(-rest // BLOCK_TOKENS), dtype=np.int64)
    return np.concatenate([known, block_tokens(ids, vocabulary)[:rest]])


PRIVATE_BASE = 1 << 40  # above every block id of a trace
PRIVATE_STRIDE = 1 << 14  # blocks that one private rest may have: 262,144 tokens

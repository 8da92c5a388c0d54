"""What a replay inserts into a tree: prompts and outputs as arrays of units (tokens, or blocks of 16 tokens)."""

from array import array
from typing import Literal

import numpy as np
import numpy.typing as npt

from pbkv_ray.errors import InputError
from pbkv_ray.replay.workload import (
    BLOCK_TOKENS,
    PRIVATE_BASE,
    PRIVATE_STRIDE,
    TraceCall,
    Workload,
    block_tokens,
    prompt_tokens,
)

Outputs = Literal["none", "private", "continued"]
Ids = npt.NDArray[np.int64]
_TOKEN_SPACE = 1 << 31


class Keys:
    """Units of the calls of a workload.

    unit_tokens: 16 makes a unit of every full block and leaves the tail of `prompt_tokens % 16` out; 1 makes tokens.
    outputs:     "none" leaves outputs out of the tree (as published hit figures do); "private" gives each output
                 units of its own (an engine with random weights); "continued" gives it the units that the next
                 call of its session has behind this prompt, where that call extends it (a real chat).
    known_only:  leave out prompt tokens that the trace has no block ids for.
    """

    def __init__(
        self,
        workload: Workload,
        unit_tokens: int = BLOCK_TOKENS,
        outputs: Outputs = "private",
        known_only: bool = False,
    ) -> None:
        if unit_tokens not in (1, BLOCK_TOKENS):
            raise InputError(f"a unit of {unit_tokens} tokens is unknown; use 1 or {BLOCK_TOKENS}")
        self.unit_tokens, self.outputs, self.known_only = unit_tokens, outputs, known_only
        self._runs = workload.runs
        starts = np.cumsum([0] + [len(run.calls) for run in workload.runs])
        self._number = starts.tolist()

    def prompt(self, run: int, call: int) -> Ids:
        """[n] int64 units of the prompt."""
        it = self._runs[run].calls[call]
        number = self._number[run] + call
        if self.unit_tokens == 1:
            tokens = prompt_tokens(it, _TOKEN_SPACE - 1, number).astype(np.int64)
            return tokens[: it.known_blocks * BLOCK_TOKENS] if self.known_only else tokens
        blocks = it.blocks()
        rest = it.prompt_tokens // BLOCK_TOKENS - len(blocks)
        if self.known_only or rest <= 0:
            return blocks
        return np.concatenate([blocks, _private(number, 0, rest)])

    def output(self, run: int, call: int) -> Ids:
        """[m] int64 units that the call adds behind its prompt. A coarse unit needs a whole block of new tokens."""
        it = self._runs[run].calls[call]
        if self.outputs == "none":
            return np.empty(0, np.int64)
        units = (
            it.output_tokens
            if self.unit_tokens == 1
            else (it.prompt_tokens + it.output_tokens) // BLOCK_TOKENS - it.prompt_tokens // BLOCK_TOKENS
        )
        if self.outputs == "continued" and (following := self._extension(run, call)) is not None:
            known = self.prompt(run, following)[len(self.prompt(run, call)) :][:units]
            if self.unit_tokens == BLOCK_TOKENS:
                return known
        private = _private(self._number[run] + call, PRIVATE_STRIDE // 2, units)
        return (
            private
            if self.unit_tokens == BLOCK_TOKENS
            else block_tokens(private, _TOKEN_SPACE - 1)[:units].astype(np.int64)
        )

    def _extension(self, run: int, call: int) -> int | None:
        calls = self._runs[run].calls
        mine = calls[call]
        for i in range(call + 1, len(calls)):
            if calls[i].session == mine.session:
                return i if _extends(calls[i], mine) else None
        return None


def _extends(later: TraceCall, earlier: TraceCall) -> bool:
    n = earlier.known_blocks
    return later.known_blocks > n and bool(np.array_equal(later.blocks()[:n], earlier.blocks()))


def _private(number: int, offset: int, count: int) -> Ids:
    first = PRIVATE_BASE + number * PRIVATE_STRIDE + offset
    return np.arange(first, first + count, dtype=np.int64)


def as_key(ids: Ids) -> "array[int]":
    """SGLang's key type."""
    key = array("q")
    key.frombytes(np.ascontiguousarray(ids, np.int64).tobytes())
    return key

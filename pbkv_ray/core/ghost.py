"""Learned reuse: P(a node is really used | an agent is called), counted from what prompts contain.

Counted from prefix-chained block hashes, evicted nodes included. Counting radix hits instead would censor itself:
what was evicted would never look reusable. A bounded ghost table keeps the hashes of the last prompt of every
(run, agent), and of the two that it left before; the next prompt shows how much of each it contains.

Because hashes are chained, two prompts agree on a prefix and nowhere else: how much is used again is one binary
search. Rates per workflow and agent (`core.reuse_counts`):

    stay    private node of the agent's latest prompt; the agent calls again with no other call in between
    back    the same, after calls of other agents
    older   node of the prompt that the agent left for its latest one, and not in that (contexts that alternate)
    next    of the latest and the older prompt, in the very next call of the run, given the two calls before it
    stale   node that the agent has read, but in neither
    shared  node of its latest prompt that other runs have read too (system prompts)
    cross   node of agent i's latest prompt, or that other runs have read too, which agent j has not read; j is called
            (context handed over)
    handed  the same of the latest prompt, in the very next call of the run, given the two calls before it

A call before is told by its agent and by whose prompt it went on with: its own latest or older one, another agent's,
or none. Two calls of one agent in turn may belong to two conversations: only this tells which one comes next.
"""

from array import array
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from pbkv_ray.core.rates import BACK, DEPTHS, KINDS, OLDER, SHARED, STALE, STAY, Rates
from pbkv_ray.core.reuse_counts import MAX_AGENTS, Call, ReuseCounts

_WORD = (1 << 64) - 1
_MIX_A, _MIX_B = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_STEP = 0x9E3779B97F4A7C15
_OLDER = "\0older"  # a call went on with the prompt that its agent had left
_PLACES = np.arange(1, (1 << 16) + 1, dtype=np.uint64) * np.uint64(_STEP)  # what each position adds


def block_hashes(tokens: Sequence[int], block_tokens: int, known: Sequence[int] = ()) -> "array[int]":
    """Prefix-chained hashes of the full blocks of a prompt: equal at i means equal up to and with block i.

    known: the hashes of the first blocks, if they were made before: those of a prompt, for what it became.
    Every token is mixed with its position (SplitMix64), and a block's hash is the sum so far,
    modulo 2**64: whole arrays at a time, and the same in every process.
    """
    out = array("q", known)
    start, end = len(out) * block_tokens, len(tokens) // block_tokens * block_tokens
    while start < end:
        upto = min(end, start + len(_PLACES) // block_tokens * block_tokens)
        new = tokens[start:upto]
        ids = (
            np.frombuffer(new, np.int64) if isinstance(new, array) and new.typecode == "q" else np.array(new, np.int64)
        )
        mixed = _PLACES[: upto - start] + np.uint64(start * _STEP & _WORD)
        mixed += ids.view(np.uint64)
        mixed ^= mixed >> np.uint64(30)
        mixed *= _MIX_A
        mixed ^= mixed >> np.uint64(27)
        mixed *= _MIX_B
        mixed ^= mixed >> np.uint64(31)
        if out:
            mixed[:1] += np.uint64(out[-1] & _WORD)  # of an array: that a word overflows is meant
        out.frombytes(mixed.cumsum()[block_tokens - 1 :: block_tokens].tobytes())
        start = upto
    return out


def common(a: Sequence[int], b: Sequence[int]) -> int:
    """Blocks that two chained sequences begin with alike."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[middle - 1] == b[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low


def _used(start: int, end: int, kept: int) -> float:
    """Of blocks [start, end), the share below `kept`."""
    return min(max(kept - start, 0), end - start) / (end - start)


@dataclass(slots=True, eq=False)
class _Prompt:
    blocks: "array[int]"
    shared: int = 0  # leading blocks that another run's prompt began with
    older: "array[int] | None" = None  # the prompt before, where this one left it
    kept: int = 0  # blocks of `older` that this one kept
    stale: "array[int] | None" = None  # the one that was left for `older`
    stale_kept: int = 0  # blocks of `stale` that this one or `older` kept

    @property
    def size(self) -> int:
        return len(self.blocks) + len(self.older or ()) + len(self.stale or ())


@dataclass(slots=True, eq=False)
class _Run:
    prompts: dict[str, _Prompt] = field(default_factory=dict)  # of each agent
    trail: tuple[Call, ...] = ()  # the last two calls


class Seen(NamedTuple):
    """What a call's prompt has to do with others: see `LearnedReuse.observe`."""

    shared_tokens: int
    leaves: bool


class LearnedReuse:
    """Counts and the ghost table. Bounded in runs, blocks and workflows; what is forgotten is counted."""

    def __init__(
        self,
        block_tokens: int = 16,
        max_blocks: int = 1 << 20,
        max_workflows: int = 256,
        max_prompt_blocks: int = 8_192,
    ) -> None:
        self.block_tokens = block_tokens
        self._max_blocks = max_blocks
        self._max_workflows = max_workflows
        self._max_prompt_blocks = max_prompt_blocks
        self._runs: OrderedDict[str, _Run] = OrderedDict()
        self._total = np.zeros((2, KINDS, len(DEPTHS)))
        self._counts: OrderedDict[str, ReuseCounts] = OrderedDict()
        self._blank = ReuseCounts(self._total)  # of workflows without observations
        self._witness: OrderedDict[tuple[str, str], list[tuple[str, array[int]]]] = OrderedDict()
        self.blocks = 0
        self.forgotten_runs = 0
        self._edges = [-(-edge // block_tokens) for edge in DEPTHS[1:]]

    def observe(self, workflow: str, run: str, agent: str, path: tuple[str, ...], blocks: Sequence[int]) -> Seen:
        """A call of `agent` with a prompt of `blocks`; `path`: who called before it in the run, of whom one counts.

        Returns the leading tokens of the prompt that another run's prompt of this agent began with too, and whether
        it leaves the agent's latest prompt of this run instead of continuing it.
        """
        prompt = array("q", blocks[: self._max_prompt_blocks])
        counts = self._of(workflow)
        known_run = self._runs.get(run)
        if known_run is None:
            known_run = self._runs[run] = _Run()
        self._runs.move_to_end(run)
        prompts, trail = known_run.prompts, known_run.trail
        last = prompts.get(agent)
        to = counts.column(agent)
        kept = 0 if last is None else common(prompt, last.blocks)
        most, source = 0, ""  # of whose prompt this one goes on with, beyond what other runs have too
        if last is not None:
            if kept > last.shared:
                most, source = kept, agent
            kind = STAY if path[-1:] == (agent,) else BACK
            self._count(counts, SHARED, to, 0, last.shared, kept)
            self._count(counts, kind, to, last.shared, len(last.blocks), kept)
            self._count_after(counts, ("latest", agent), trail, last.shared, len(last.blocks), kept)
            if last.older is not None:
                again = common(prompt, last.older)
                if again > max(most, last.shared):
                    most, source = again, _OLDER
                self._count(counts, OLDER, to, last.kept, len(last.older), again)
                self._count_after(counts, ("older", agent), trail, last.kept, len(last.older), again)
            if last.stale is not None:
                self._count(counts, STALE, to, last.stale_kept, len(last.stale), common(prompt, last.stale))
        for name, other in prompts.items():
            if name != agent:
                known = common(other.blocks, last.blocks) if last is not None else 0
                private, again = max(known, other.shared), common(prompt, other.blocks)
                if again > max(most, other.shared):
                    most, source = again, name
                reader = counts.column(name)
                if private < len(other.blocks):
                    used = _used(private, len(other.blocks), again)
                    counts.count_cross(0, reader, to, used)
                    counts.count_after(("handed", name, agent), trail, used)
                if known < other.shared:
                    counts.count_cross(1, reader, to, _used(known, other.shared, again))
        known_run.trail = (*trail[-1:], (agent, source))
        counts.seen()
        self._blank.seen()
        shared = self._shared(workflow, run, agent, prompt)
        self._keep(prompts, agent, _Prompt(prompt, shared), last, kept)
        return Seen(shared * self.block_tokens, last is not None and kept < len(last.blocks))

    def end(self, run: str) -> None:
        """The run's prompts are needed no more; idempotent."""
        known = self._runs.pop(run, None)
        for prompt in () if known is None else known.prompts.values():
            self.blocks -= prompt.size

    def rates(self, workflow: str, agents: Sequence[str], path: tuple[str, ...] = (), run: str = "") -> Rates:
        """What is known of these agents now, one column each; `path`: the agents that called last in the `run`."""
        known = self._runs.get(run)
        return self._counts.get(workflow, self._blank).rates(agents, path, () if known is None else known.trail)

    def _count(self, counts: ReuseCounts, kind: int, agent: int, start: int, end: int, kept: int) -> None:
        """Blocks [start, end) were candidates, those below `kept` were used: one observation per depth class."""
        if end > start:
            edges = [start, *(edge for edge in self._edges if start < edge < end), end]
            first = bisect_right(self._edges, start)
            counts.count(kind, agent, [(first + i, _used(*span, kept)) for i, span in enumerate(pairwise(edges))])

    def _count_after(
        self, counts: ReuseCounts, what: tuple[str, str], trail: tuple[Call, ...], start: int, end: int, kept: int
    ) -> None:
        if end > start:
            counts.count_after(what, trail, _used(start, end, kept))

    def _shared(self, workflow: str, run: str, agent: str, prompt: "array[int]") -> int:
        """Compares with the latest prompts of this agent in two runs, of which one at least is another."""
        key = (workflow, agent)
        seen = self._witness.setdefault(key, [])
        shared = max((common(prompt, blocks) for other, blocks in seen if other != run), default=0)
        seen[:] = [*[entry for entry in seen if entry[0] != run][-1:], (run, prompt)]
        self._witness.move_to_end(key)
        if len(self._witness) > 4 * self._max_workflows:
            self._witness.popitem(last=False)
        return shared

    def _keep(self, prompts: dict[str, _Prompt], agent: str, new: _Prompt, last: _Prompt | None, kept: int) -> None:
        """`new` takes the place of `last`, of which it kept so many blocks."""
        if last is not None:
            if kept < len(last.blocks):
                new.older, new.kept, new.stale = last.blocks, kept, last.older
            elif last.older is not None:  # it grew: what was left before stays left
                new.older, new.kept, new.stale = last.older, common(new.blocks, last.older), last.stale
            if new.stale is not None and new.older is not None:
                new.stale_kept = max(common(new.blocks, new.stale), common(new.older, new.stale))
            self.blocks -= last.size
        elif len(prompts) >= MAX_AGENTS:
            return
        prompts[agent] = new
        self.blocks += new.size
        while self.blocks > self._max_blocks and len(self._runs) > 1:
            self.end(next(iter(self._runs)))
            self.forgotten_runs += 1

    def _of(self, workflow: str) -> ReuseCounts:
        counts = self._counts.get(workflow)
        if counts is None:
            counts = self._counts[workflow] = ReuseCounts(self._total)
            if len(self._counts) > self._max_workflows:
                self._counts.popitem(last=False)
        self._counts.move_to_end(workflow)
        return counts

    def check_invariants(self) -> None:
        held = sum(prompt.size for run in self._runs.values() for prompt in run.prompts.values())
        assert held == self.blocks, f"{self.blocks} blocks counted, {held} held"
        assert self.blocks <= self._max_blocks or len(self._runs) == 1
        assert len(self._counts) <= self._max_workflows

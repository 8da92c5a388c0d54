"""Learned reuse: P(a node is really used | an agent is called), counted from what prompts contain.

Counted from prefix-chained block hashes, evicted nodes included. Counting radix hits instead would censor itself:
what was evicted would never look reusable. A bounded ghost table keeps the hashes of the last prompt of every
(run, agent), and of the one before it where the two diverged; the next prompt shows how much of each it contains.

Because hashes are chained, two prompts agree on a prefix and nowhere else: how much is used again is one binary
search. Five rates per workflow and agent, by depth class, lean on the workflow's, those on everybody's, those on
a prior:

    stay    private node of the agent's latest prompt; the agent calls again with no other call in between
    back    the same, after calls of other agents
    stale   node that the agent has read, but not in its latest prompt
    shared  node of its latest prompt that other runs have read too (system prompts)
    cross   node that agent i of the run has read and agent j has not; j is called (context handed over)
"""

from array import array
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]

DEPTHS = (0, 1_024, 4_096, 16_384)  # tokens before a node's first one, lower edges of the depth classes
STAY, BACK, STALE, SHARED = range(4)
_PRIOR = np.array([0.9, 0.8, 0.1, 0.98])
_CROSS_PRIOR = 0.02
_TRUST = 4.0  # observations that the coarser estimate is worth
_MEMORY = 256.0  # observations after which older ones fade
_MAX_AGENTS = 64  # per workflow; later ones share the last column


def depth_class(tokens: int) -> int:
    """Class of a node with `tokens` tokens before it; grows with depth, so a child's is never below its parent's."""
    return bisect_left(DEPTHS, tokens + 1) - 1


def block_hashes(tokens: Sequence[int], block_tokens: int) -> "array[int]":
    """Prefix-chained hashes of the full blocks of a prompt: equal at i means equal up to and with block i.

    Python's hash of integers does not depend on the process, so every rank computes the same.
    """
    chained, out = 0, array("q")
    for start in range(0, len(tokens) - block_tokens + 1, block_tokens):
        chained = hash((chained, *tokens[start : start + block_tokens]))
        out.append(chained)
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


@dataclass(frozen=True, slots=True, eq=False)
class Rates:
    """Learned reuse in the columns of one run's agents (B); C depth classes, falling along C.

    kind: [4, C, B] by STAY, BACK, STALE, SHARED; stale is the least, shared the greatest of the four.
    cross: [2, B, B] from the agent that read the node (row) to the one that is called; [1] for shared nodes.
    """

    kind: Array
    cross: Array

    def use(
        self,
        ever: npt.NDArray[np.bool_],
        fresh: npt.NDArray[np.bool_],
        shared: npt.NDArray[np.bool_],
        depth: npt.NDArray[np.int64],
    ) -> tuple[Array, Array]:
        """([R, B], [R, B]) P(used | that agent calls): after other calls, and without any in between."""
        handed = np.where(
            shared[:, None],
            (ever[:, :, None] * self.cross[1]).max(axis=1),
            (ever[:, :, None] * self.cross[0]).max(axis=1),
        )
        floor = np.maximum(handed, ever * self.kind[STALE][depth])
        alike = fresh & shared[:, None]
        best = np.maximum(floor, alike * self.kind[SHARED][depth])
        return (
            np.maximum(best, fresh * self.kind[BACK][depth]),
            np.maximum(best, fresh * self.kind[STAY][depth]),
        )


def certain(agents: int) -> Rates:
    """What an agent has read it uses again, and nothing else: the paper's assumption."""
    kind = np.ones((4, len(DEPTHS), agents))
    return Rates(kind, np.zeros((2, agents, agents)))


class _Counts:
    """Observations of one workflow: weights and used shares, by kind, depth class and agent."""

    __slots__ = ("agents", "cross", "kind", "rates", "seen", "seen_at_rates")

    def __init__(self) -> None:
        self.agents: dict[str, int] = {}
        self.kind = np.zeros((2, 4, len(DEPTHS), 4))  # [weight | used, kind, class, agent]
        self.cross = np.zeros((2, 2, 4, 4))  # [weight | used, private | shared, from, to]
        self.rates: tuple[Array, Array] | None = None
        self.seen = self.seen_at_rates = 0

    def column(self, agent: str) -> int:
        known = self.agents.get(agent)
        if known is None:
            known = min(len(self.agents), _MAX_AGENTS - 1)
            if len(self.agents) < _MAX_AGENTS - 1:
                self.agents[agent] = known
            if known >= self.kind.shape[-1]:
                more = self.kind.shape[-1]
                self.kind = np.pad(self.kind, [(0, 0)] * 3 + [(0, more)])
                self.cross = np.pad(self.cross, [(0, 0), (0, 0), (0, more), (0, more)])
            self.rates = None
        return known

    def find(self, agent: str) -> int:
        return self.agents.get(agent, _MAX_AGENTS - 1)


@dataclass(slots=True, eq=False)
class _Prompt:
    blocks: "array[int]"
    shared: int = 0  # leading blocks that another run's prompt began with
    older: "array[int] | None" = None  # the prompt before, where this one left it
    kept: int = 0  # blocks of `older` that this one kept


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
        self._runs: OrderedDict[str, dict[str, _Prompt]] = OrderedDict()
        self._counts: OrderedDict[str, _Counts] = OrderedDict()
        self._blank = _Counts()  # of workflows without observations
        self._total = np.zeros((2, 4, len(DEPTHS)))
        self._witness: OrderedDict[tuple[str, str], list[tuple[str, array[int]]]] = OrderedDict()
        self.blocks = 0
        self.forgotten_runs = 0
        self._edges = [-(-edge // block_tokens) for edge in DEPTHS[1:]]

    def observe(self, workflow: str, run: str, agent: str, previous: str | None, blocks: Sequence[int]) -> int:
        """A call of `agent` with a prompt of `blocks`; `previous` called before it in the run (None: nobody).

        Returns the leading tokens of the prompt that another run's prompt of this agent began with too.
        """
        prompt = array("q", blocks[: self._max_prompt_blocks])
        counts = self._of(workflow)
        prompts = self._runs.get(run)
        if prompts is None:
            prompts = self._runs[run] = {}
        self._runs.move_to_end(run)
        last = prompts.get(agent)
        to = counts.column(agent)
        if last is not None:
            kept = common(prompt, last.blocks)
            kind = STAY if previous == agent else BACK
            self._count(counts, SHARED, to, 0, last.shared, kept)
            self._count(counts, kind, to, last.shared, len(last.blocks), kept)
            if last.older is not None:
                self._count(counts, STALE, to, last.kept, len(last.older), common(prompt, last.older))
        for name, other in prompts.items():
            if name != agent:
                known = common(other.blocks, last.blocks) if last is not None else 0
                kept = common(prompt, other.blocks)
                source = counts.column(name)
                self._count_cross(counts, 0, source, to, max(known, other.shared), len(other.blocks), kept)
                self._count_cross(counts, 1, source, to, known, other.shared, kept)
        counts.seen += 1
        self._blank.seen += 1
        shared = self._shared(workflow, run, agent, prompt)
        self._keep(prompts, agent, prompt, shared, last)
        return shared * self.block_tokens

    def end(self, run: str) -> None:
        """The run's prompts are needed no more; idempotent."""
        for prompt in self._runs.pop(run, {}).values():
            self.blocks -= len(prompt.blocks) + len(prompt.older or ())

    def rates(self, workflow: str, agents: Sequence[str]) -> Rates:
        """What is known of these agents now, one column each."""
        counts = self._counts.get(workflow, self._blank)
        # Rates move little once much was seen: look again after 3 % more observations.
        if counts.rates is None or counts.seen > counts.seen_at_rates + counts.seen_at_rates // 32:
            counts.rates = self._estimate(counts)
            counts.seen_at_rates = counts.seen
        kind, cross = counts.rates
        width = kind.shape[-1] - 1  # the last column is what unknown agents get
        columns = np.array([min(counts.find(agent), width) for agent in agents], np.intp)
        return Rates(kind[:, :, columns], cross[:, columns[:, None], columns[None, :]])

    def _estimate(self, counts: _Counts) -> tuple[Array, Array]:
        """[4, C, A + 1], [2, A + 1, A + 1]; the last column and row are for agents not seen yet."""
        total = self._total
        prior = _PRIOR[:, None]
        # Coarsest first: all depths of all workflows, one depth of them, the workflow's depth, the agent's depth.
        rate = (total[1].sum(1, keepdims=True) + _TRUST * prior) / (total[0].sum(1, keepdims=True) + _TRUST)
        rate = (total[1] + _TRUST * rate) / (total[0] + _TRUST)
        mine = counts.kind.sum(-1)
        rate = (mine[1] + _TRUST * rate) / (mine[0] + _TRUST)
        padded = np.pad(counts.kind, [(0, 0)] * 3 + [(0, 1)])
        whole = padded.sum(2, keepdims=True)  # the agent at any depth
        agent = (whole[1] + _TRUST * rate[..., None]) / (whole[0] + _TRUST)
        kind = (padded[1] + _TRUST * agent) / (padded[0] + _TRUST)
        kind = np.minimum.accumulate(kind, axis=1)  # deeper is never more likely: child <= parent
        kind[[STAY, BACK]] = np.maximum(kind[[STAY, BACK]], kind[STALE])
        kind[SHARED] = np.maximum(kind[SHARED], kind[[STAY, BACK]].max(0))

        # No leaning on other pairs: credit for a first use that was never seen is harmful (data/statistics.md, 3b).
        pairs = np.pad(counts.cross, [(0, 0), (0, 0), (0, 1), (0, 1)])
        cross = (pairs[1] + _TRUST * _CROSS_PRIOR) / (pairs[0] + _TRUST)
        cross[1] = np.maximum(cross[1], cross[0])
        return kind, cross

    def _count(self, counts: _Counts, kind: int, agent: int, start: int, end: int, kept: int) -> None:
        """Blocks [start, end) were candidates, those below `kept` were used: one observation per depth class."""
        if end <= start:
            return
        low = start
        for depth, edge in enumerate([*self._edges, end]):
            high = min(edge, end)
            if high > low:
                used = min(max(kept - low, 0), high - low) / (high - low)
                for table in (counts.kind[:, kind, depth, agent], self._total[:, kind, depth]):
                    if table[0] > _MEMORY:
                        table *= 0.5
                    table[0] += 1.0
                    table[1] += used
                low = high

    def _count_cross(self, counts: _Counts, shared: int, source: int, to: int, start: int, end: int, kept: int) -> None:
        if end > start:
            used = min(max(kept - start, 0), end - start) / (end - start)
            table = counts.cross[:, shared, source, to]
            if table[0] > _MEMORY:
                table *= 0.5
            table[0] += 1.0
            table[1] += used

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

    def _keep(
        self, prompts: dict[str, _Prompt], agent: str, prompt: "array[int]", shared: int, last: _Prompt | None
    ) -> None:
        new = _Prompt(prompt, shared)
        if last is not None:
            kept = common(prompt, last.blocks)
            if kept < len(last.blocks):
                new.older, new.kept = last.blocks, kept
            elif last.older is not None:  # it grew: what was left before stays left
                new.older, new.kept = last.older, common(prompt, last.older)
            self.blocks -= len(last.blocks) + len(last.older or ())
        elif len(prompts) >= _MAX_AGENTS:
            return
        prompts[agent] = new
        self.blocks += len(prompt) + len(new.older or ())
        while self.blocks > self._max_blocks and len(self._runs) > 1:
            self.end(next(iter(self._runs)))
            self.forgotten_runs += 1

    def _of(self, workflow: str) -> _Counts:
        counts = self._counts.get(workflow)
        if counts is None:
            counts = self._counts[workflow] = _Counts()
            if len(self._counts) > self._max_workflows:
                self._counts.popitem(last=False)
        self._counts.move_to_end(workflow)
        return counts

    def check_invariants(self) -> None:
        held = sum(len(p.blocks) + len(p.older or ()) for run in self._runs.values() for p in run.values())
        assert held == self.blocks, f"{self.blocks} blocks counted, {held} held"
        assert self.blocks <= self._max_blocks or len(self._runs) == 1
        assert len(self._counts) <= self._max_workflows

"""Learned reuse: P(a node is really used | an agent is called), counted from what prompts contain.

Counted from prefix-chained block hashes, evicted nodes included. Counting radix hits instead would censor itself:
what was evicted would never look reusable. A bounded ghost table keeps the hashes of the last prompt of every
(run, agent), and of the two that it left before; the next prompt shows how much of each it contains.

Because hashes are chained, two prompts agree on a prefix and nowhere else: how much is used again is one binary
search. Seven rates per workflow and agent, by depth class, lean on the workflow's, those on everybody's, those on
a prior:

    stay    private node of the agent's latest prompt; the agent calls again with no other call in between
    back    the same, after calls of other agents
    older   node of the prompt that the agent left for its latest one, and not in that (contexts that alternate)
    next    of the latest and the older prompt, in the very next call of the run, given the two agents before it
    stale   node that the agent has read, but in neither
    shared  node of its latest prompt that other runs have read too (system prompts)
    cross   node that agent i of the run has read and agent j has not; j is called (context handed over)
"""

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from pbkv_ray.core.rates import BACK, DEPTHS, KINDS, OLDER, SHARED, STALE, STAY, Array, Rates

_PRIOR = np.array([0.9, 0.8, 0.1, 0.1, 0.98])
_CROSS_PRIOR = 0.02
_TRUST = 4.0  # observations that the coarser estimate is worth
_MEMORY = 256.0  # observations after which older ones fade
_AFTER = ("latest", "older")
_MAX_PATHS = 4_096  # per workflow; later ones are not told apart
_NOTHING = (0.0, 0.0)
_MAX_AGENTS = 64  # per workflow; later ones share the last column
_WORD = (1 << 64) - 1
_MIX_A, _MIX_B = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_STEP = 0x9E3779B97F4A7C15
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


class _Counts:
    """Observations of one workflow: weights and used shares, by kind, depth class and agent."""

    __slots__ = ("after", "agents", "cross", "kind", "rates", "seen", "seen_at_rates")

    def __init__(self) -> None:
        self.agents: dict[str, int] = {}
        self.kind = np.zeros((2, KINDS, len(DEPTHS), 4))  # [weight | used, kind, class, agent]
        self.cross = np.zeros((2, 2, 4, 4))  # [weight | used, private | shared, from, to]
        self.after: dict[tuple[str, ...], tuple[float, float]] = {}  # kind, agent, who called before it -> seen, used
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
    stale: "array[int] | None" = None  # the one that was left for `older`
    stale_kept: int = 0  # blocks of `stale` that this one or `older` kept

    @property
    def size(self) -> int:
        return len(self.blocks) + len(self.older or ()) + len(self.stale or ())


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
        self._runs: OrderedDict[str, dict[str, _Prompt]] = OrderedDict()
        self._counts: OrderedDict[str, _Counts] = OrderedDict()
        self._blank = _Counts()  # of workflows without observations
        self._total = np.zeros((2, KINDS, len(DEPTHS)))
        self._witness: OrderedDict[tuple[str, str], list[tuple[str, array[int]]]] = OrderedDict()
        self.blocks = 0
        self.forgotten_runs = 0
        self._edges = [-(-edge // block_tokens) for edge in DEPTHS[1:]]

    def observe(self, workflow: str, run: str, agent: str, path: tuple[str, ...], blocks: Sequence[int]) -> Seen:
        """A call of `agent` with a prompt of `blocks`; `path`: who called before it in the run, of whom two count.

        Returns the leading tokens of the prompt that another run's prompt of this agent began with too, and whether
        it leaves the agent's latest prompt of this run instead of continuing it.
        """
        prompt = array("q", blocks[: self._max_prompt_blocks])
        counts = self._of(workflow)
        prompts = self._runs.get(run)
        if prompts is None:
            prompts = self._runs[run] = {}
        self._runs.move_to_end(run)
        last = prompts.get(agent)
        to = counts.column(agent)
        kept = 0 if last is None else common(prompt, last.blocks)
        if last is not None:
            kind = STAY if path[-1:] == (agent,) else BACK
            self._count(counts, SHARED, to, 0, last.shared, kept)
            self._count(counts, kind, to, last.shared, len(last.blocks), kept)
            self._count_after(counts, ("latest", agent), path, last.shared, len(last.blocks), kept)
            if last.older is not None:
                again = common(prompt, last.older)
                self._count(counts, OLDER, to, last.kept, len(last.older), again)
                self._count_after(counts, ("older", agent), path, last.kept, len(last.older), again)
            if last.stale is not None:
                self._count(counts, STALE, to, last.stale_kept, len(last.stale), common(prompt, last.stale))
        for name, other in prompts.items():
            if name != agent:
                known = common(other.blocks, last.blocks) if last is not None else 0
                handed = common(prompt, other.blocks)
                source = counts.column(name)
                self._count_cross(counts, 0, source, to, max(known, other.shared), len(other.blocks), handed)
                self._count_cross(counts, 1, source, to, known, other.shared, handed)
        counts.seen += 1
        self._blank.seen += 1
        shared = self._shared(workflow, run, agent, prompt)
        self._keep(prompts, agent, _Prompt(prompt, shared), last, kept)
        return Seen(shared * self.block_tokens, last is not None and kept < len(last.blocks))

    def end(self, run: str) -> None:
        """The run's prompts are needed no more; idempotent."""
        for prompt in self._runs.pop(run, {}).values():
            self.blocks -= prompt.size

    def rates(self, workflow: str, agents: Sequence[str], path: tuple[str, ...] = ()) -> Rates:
        """What is known of these agents now, one column each; `path`: the last two agents that called in the run."""
        counts = self._counts.get(workflow, self._blank)
        # Rates move little once much was seen: look again after 3 % more observations.
        if counts.rates is None or counts.seen > counts.seen_at_rates + counts.seen_at_rates // 32:
            counts.rates = self._estimate(counts)
            counts.seen_at_rates = counts.seen
        kind, cross = counts.rates
        width = kind.shape[-1] - 1  # the last column is what unknown agents get
        columns = np.array([min(counts.find(agent), width) for agent in agents], np.intp)
        kind = kind[:, :, columns]
        following = np.stack(
            (np.where([(agent,) == path[-1:] for agent in agents], kind[STAY], kind[BACK]), kind[OLDER])
        )
        for known in (path[-1:], path[-2:])[: len(path)]:
            of = [[counts.after.get((kind_, agent, *known), _NOTHING) for agent in agents] for kind_ in _AFTER]
            seen = np.array(of)[:, None]  # [2, 1, B, (seen, used)]
            following = (seen[..., 1] + _TRUST * following) / (seen[..., 0] + _TRUST)
        return Rates(kind, following, cross[:, columns[:, None], columns[None, :]])

    def _estimate(self, counts: _Counts) -> tuple[Array, Array]:
        """[KINDS, C, A + 1], [2, A + 1, A + 1]; the last column and row are for agents not seen yet."""
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
        kind = np.maximum(kind, kind[STALE])
        kind[SHARED] = kind.max(0)

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

    def _count_after(
        self, counts: _Counts, what: tuple[str, str], path: tuple[str, ...], start: int, end: int, kept: int
    ) -> None:
        if end > start:
            used = min(max(kept - start, 0), end - start) / (end - start)
            for key in {(*what, *path[-1:]), (*what, *path[-2:])}:
                if key in counts.after or len(counts.after) < _MAX_PATHS:
                    seen, sum_used = counts.after.get(key, _NOTHING)
                    fade = 0.5 if seen > _MEMORY else 1.0
                    counts.after[key] = (fade * seen + 1.0, fade * sum_used + used)

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
        elif len(prompts) >= _MAX_AGENTS:
            return
        prompts[agent] = new
        self.blocks += new.size
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
        held = sum(prompt.size for prompts in self._runs.values() for prompt in prompts.values())
        assert held == self.blocks, f"{self.blocks} blocks counted, {held} held"
        assert self.blocks <= self._max_blocks or len(self._runs) == 1
        assert len(self._counts) <= self._max_workflows

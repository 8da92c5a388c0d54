"""Why a call did not find its prompt on the device: what left the tiers, and what was never there.

Evictions are remembered per run and position in the prompt, since a run's calls grow one context; a span that went
and was computed again is forgotten. What no eviction of the run covers was never cached, or was for other owners:
prompts' block hashes tell which, and under which tenant's salt. Bounded; what falls out is told as "evicted" without
when and why, or as "never_cached".
"""

from collections import OrderedDict, deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Literal

from pbkv_ray.core.nodes import Reason, Tier

Cause = Literal["never_cached", "evicted", "retired", "demoted", "salt", "other_replica"]


@dataclass(frozen=True, slots=True)
class Missed:
    """Prompt tokens [start, end) that the device tier did not hold when the call was admitted.

    never_cached   nobody had computed them here
    evicted        they went: at_s on the broadcast clock, with the score that they had then, and what decided
    retired        they were of runs that had ended
    demoted        the host tier held them, from where they were loaded
    salt           they are cached for another tenant
    other_replica  the run computed them elsewhere (`replica`); the engine cannot know, whoever reads both can
    """

    start: int
    end: int
    cause: Cause
    at_s: float | None = None
    score: float | None = None
    reason: str = ""
    replica: str = ""


@dataclass(frozen=True, slots=True)
class _Left:
    start: int
    end: int
    tier: Tier
    reason: Reason
    score: float
    at_s: float


class MissLedger:
    """One engine's. block_tokens: of the block hashes that `call` is given."""

    def __init__(
        self, block_tokens: int, *, max_runs: int = 4_096, max_spans: int = 64, max_blocks: int = 131_072
    ) -> None:
        self._block_tokens = block_tokens
        self._max_runs = max_runs
        self._max_spans = max_spans
        self._max_blocks = max_blocks
        self._left: OrderedDict[str, deque[_Left]] = OrderedDict()
        self._blocks: OrderedDict[int, tuple[Hashable, str]] = OrderedDict()  # -> salt and run of the last prompt

    def left(
        self, runs: Sequence[str], start: int, tokens: int, tier: Tier, reason: Reason, score: float, at_s: float
    ) -> None:
        """A node of `runs` has left `tier`: `tokens` tokens that stood behind `start` others."""
        span = _Left(start, start + tokens, tier, reason, score, at_s)
        for run in runs:
            spans = self._left.pop(run, None) or deque[_Left](maxlen=self._max_spans)
            spans.append(span)
            self._left[run] = spans
        while len(self._left) > self._max_runs:
            self._left.popitem(last=False)

    def call(
        self, run: str, prompt_tokens: int, device: int, host: int, blocks: Sequence[int], salt: Hashable
    ) -> list[Missed]:
        """What the call of `run` missed, in order. It found `device` tokens, then `host` tokens in the host tier."""
        known = self._left.get(run, ())
        missed = []
        if host:
            last = next((s for s in reversed(known) if s.tier is Tier.DEVICE and s.start < device + host), None)
            when = (last.at_s, last.score, last.reason) if last is not None else (None, None, "")
            missed.append(Missed(device, device + host, "demoted", *when))
        at = device + host
        while at < prompt_tokens:
            found = next((s for s in reversed(known) if s.start <= at < s.end), None)
            if found is not None:
                end = min(found.end, prompt_tokens)
                cause: Cause = "retired" if found.reason == "retired" else "evicted"
                missed.append(Missed(at, end, cause, found.at_s, found.score, found.reason))
            else:
                end = min([prompt_tokens, *(s.start for s in known if s.start > at)])
                missed += self._unexplained(at, end, run, blocks, salt)
            at = end
        self._computed(run, device + host, prompt_tokens)
        self._seen(run, blocks, salt)
        return missed

    def end(self, run: str) -> None:
        self._left.pop(run, None)

    def clear(self) -> None:
        """The cache was emptied on purpose: nothing of before explains anything."""
        self._left.clear()
        self._blocks.clear()

    def _unexplained(self, start: int, end: int, run: str, blocks: Sequence[int], salt: Hashable) -> list[Missed]:
        """Of spans that no eviction of the run covers, block by block, equal neighbours together."""
        size = self._block_tokens
        parts: list[Missed] = []
        at = start
        while at < end:
            index = at // size
            cause = self._cause(blocks[index], run, salt) if index < len(blocks) else "never_cached"
            upto = min(end, (index + 1) * size) if index < len(blocks) else end
            if parts and parts[-1].cause == cause:
                parts[-1] = Missed(parts[-1].start, upto, cause)
            else:
                parts.append(Missed(at, upto, cause))
            at = upto
        return parts

    def _cause(self, block: int, run: str, salt: Hashable) -> Cause:
        known = self._blocks.get(block)
        if known is None:
            return "never_cached"
        if known[0] != salt:
            return "salt"
        return "evicted" if known[1] == run else "retired"

    def _computed(self, run: str, start: int, end: int) -> None:
        """The span is in the cache again: what went before is history."""
        spans = self._left.get(run)
        if spans is not None:
            kept = [span for span in spans if span.start >= end or span.end <= start]
            spans.clear()
            spans.extend(kept)

    def _seen(self, run: str, blocks: Sequence[int], salt: Hashable) -> None:
        for block in blocks:
            self._blocks.pop(block, None)
            self._blocks[block] = salt, run
        while len(self._blocks) > self._max_blocks:
            self._blocks.popitem(last=False)

"""What waits in a scheduler's queue: what it will have to compute, at which pace, and who waits for a sibling.

SGLang admits requests in the order they came and matches each against the tree as it was before the batch. Of eight
siblings with one cold prefix it therefore computes the prefix as often as fit into a batch. `hold_back` leaves all but
the first of them in the queue until the prefix is in the tree.
"""

import logging
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

logger = logging.getLogger(__name__)

HEAD_TOKENS = 64  # prompts that differ here are not compared
MIN_SHARED_TOKENS = 256  # a shared prefix below it is not worth a wait
MAX_LOOKED_AT = 64  # requests at the front of the queue
MAX_LEADERS = 8  # of one head
MAX_COUNTED = 512  # waiting requests whose cached prefix is looked up for a report; the rest count in full


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """head: equal for prompts that may share a prefix (tenant included), None for one too short to matter."""

    ids: npt.NDArray[np.int64]
    head: Hashable | None


def prompt_of(req: Any) -> Prompt:
    """Of a scheduler's request; kept there."""
    known: Prompt | None = getattr(req, "pbkv_prompt", None)
    if known is None:
        ids = np.asarray(req.origin_input_ids, np.int64)
        space = (getattr(req, "extra_key", None), getattr(req, "cache_salt", None))
        head = (*space, ids[:HEAD_TOKENS].tobytes()) if len(ids) >= MIN_SHARED_TOKENS else None
        known = req.pbkv_prompt = Prompt(ids, head)
    return known


def hold_back(waiting: Sequence[Prompt], in_progress: Iterable[Prompt], cached: Callable[[int], int]) -> dict[int, int]:
    """Indices into `waiting` of those who should wait, and how many tokens each shares with one that goes before.

    in_progress: prompts that are being computed and may not be in the tree yet. cached: index -> leading tokens that
    the tree holds of the prompt. The first of each group is never held, so whoever waits, waits for work in progress.
    """
    leaders: dict[Hashable, list[Prompt]] = {}
    for prompt in in_progress:
        if prompt.head is not None:
            leaders.setdefault(prompt.head, []).append(prompt)
    held: dict[int, int] = {}
    for index, prompt in enumerate(waiting[:MAX_LOOKED_AT]):
        if prompt.head is None:
            continue
        group = leaders.setdefault(prompt.head, [])
        shared = max((_common(prompt, leader) for leader in group), default=0)
        if shared >= MIN_SHARED_TOKENS and shared - cached(index) >= MIN_SHARED_TOKENS:
            held[index] = shared
        elif len(group) < MAX_LEADERS:
            group.append(prompt)
    return held


def _common(one: Prompt, other: Prompt) -> int:
    n = min(len(one.ids), len(other.ids))
    differs = np.flatnonzero(one.ids[:n] != other.ids[:n])
    return int(differs[0]) if len(differs) else n


class Pace:
    """Prefill tokens a second, from the time between a prefill batch and the next plan; 0 until one was seen."""

    def __init__(self, keep: float = 0.9) -> None:
        self._keep = keep
        self._tokens = self._seconds = 0.0
        self._batch: tuple[int, float] | None = None

    def planned(self, prefill_tokens: int, now_s: float) -> None:
        """The scheduler plans its next batch, with so many prefill tokens in it."""
        if self._batch is not None:
            tokens, since_s = self._batch
            self._tokens = self._keep * self._tokens + tokens
            self._seconds = self._keep * self._seconds + now_s - since_s
        self._batch = (prefill_tokens, now_s) if prefill_tokens else None

    @property
    def tokens_s(self) -> float:
        return self._tokens / self._seconds if self._seconds > 0 else 0.0


class Queue:
    """Of one scheduler; lives on its radix cache."""

    def __init__(self, core: Any) -> None:
        self.pace = Pace()
        self.failed = False
        self.held = 0  # requests that were held back, counted once each
        self._core = core
        self._admitted: list[Prompt] = []  # by the last plan: with overlapped scheduling they are not in the tree yet

    def plan(self, scheduler: Any, make: Callable[[], Any]) -> Any:
        """`make` plans a prefill batch from `scheduler.waiting_queue`; those to be held back are not in it then."""
        everyone = scheduler.waiting_queue
        if not everyone:  # as before most decode steps
            self._admitted = []
            return make()
        held = self._held(everyone, scheduler.chunked_req)
        scheduler.waiting_queue = [req for index, req in enumerate(everyone) if index not in held]
        try:
            return make()
        finally:
            left, known = {id(req) for req in scheduler.waiting_queue}, {id(req) for req in everyone}
            new = [req for req in scheduler.waiting_queue if id(req) not in known]
            scheduler.waiting_queue = [r for i, r in enumerate(everyone) if i in held or id(r) in left] + new
            here = {id(req) for req in scheduler.waiting_queue}
            gone = (req for req in everyone[:MAX_LOOKED_AT] if id(req) not in here)
            self._admitted = [] if self.failed else [prompt_of(req) for req in gone]

    def _held(self, everyone: list[Any], chunked: Any | None) -> dict[int, int]:
        """Nobody is held any more once this has failed: the queue must go on."""
        if self.failed:
            return {}
        try:
            prompts = [prompt_of(req) for req in everyone[:MAX_LOOKED_AT]]
            running = [*self._admitted, *([] if chunked is None else [prompt_of(chunked)])]
            held = hold_back(prompts, running, lambda index: self.cached_tokens(everyone[index]))
        except Exception:
            self.failed = True
            logger.exception("holding siblings back failed and is off from now on")
            return {}
        for index, shared in held.items():
            self.held += not hasattr(everyone[index], "pbkv_shared")
            everyone[index].pbkv_shared = shared
        return held

    def cached_tokens(self, req: Any) -> int:
        """Leading prompt tokens that the tree holds in either tier. Reads only."""
        from sglang.srt.mem_cache.radix_cache import RadixKey

        core = self._core
        key = RadixKey(req.origin_input_ids, req.extra_key, cache_salt=getattr(req, "cache_salt", None))
        key = key.maybe_to_bigram_view(core.is_eagle)[0].page_aligned(core.page_size)
        node, found = core.root_node, 0
        while found < len(key):
            child = node.children.get(key.child_key_at(found, core.page_size))
            if child is None or (child.evicted and not child.backuped):
                break
            matched = child.key.match_at(key, found, page_size=core.page_size)
            found += matched
            if matched < len(child.key):
                break
            node = child
        return found

    def waiting_tokens(self, scheduler: Any) -> int:
        """Prompt tokens that the queue, and a prompt of which only chunks are done, will have to compute."""
        tokens = 0
        for index, req in enumerate(scheduler.waiting_queue):
            counted = index < MAX_COUNTED and not self.failed
            known = max(self.cached_tokens(req), getattr(req, "pbkv_shared", 0)) if counted else 0
            tokens += max(1, len(req.origin_input_ids) - known)
        chunked = scheduler.chunked_req
        return tokens + (0 if chunked is None else max(0, len(chunked.origin_input_ids) - chunked.prefix_len))

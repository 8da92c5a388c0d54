"""The radix tree that keeps a ReuseIndex up to date, and the eviction walk that asks it for victims.

Both are SGLang's own classes with the few methods overridden where a node appears, splits, changes tier or becomes
an evictable leaf. The stock walk builds a heap of all evictable leaves at every call; ours asks for the next victim.
Nothing here may fail an eviction: when the index raises, the walk goes on in SGLang's LRU order, and it is counted.
"""

import logging
from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass, field, replace
from typing import Any

from sglang.srt.mem_cache.unified_cache.components import BASE_COMPONENT_TYPE as FULL
from sglang.srt.mem_cache.unified_cache.components import FullComponent
from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeNode

from pbkv_ray.core.backlog import HOST_FREE, HOST_HELD
from pbkv_ray.core.owners import OwnersOptions
from pbkv_ray.core.reuse import Explanation, Reason, ReuseIndex, Tier
from pbkv_ray.core.scores import score_of
from pbkv_ray.engine.policies import RadixOptions
from pbkv_ray.engine.tree_walks import TreeWalks

logger = logging.getLogger(__name__)
PRESSED = 64  # broadcasts of hints for which scores are kept up to date once a victim was wanted


@dataclass(slots=True)
class TreeCount:
    """Tokens by why they went, per tier; and what went wrong."""

    evicted_tokens: list[dict[str, int]] = field(
        default_factory=lambda: [{"retired": 0, "scored": 0, "recency": 0} for _ in Tier]
    )
    recent: deque[tuple[str, int, str, float]] = field(default_factory=lambda: deque(maxlen=32))
    partial: int = 0  # leaves of which only the tail was freed
    fallbacks: int = 0  # eviction walks that ended in LRU order because the index raised
    failures: int = 0  # times the index had to be given up until the next flush


class OwnedTreeCore(TreeWalks):
    """SGLang's Python tree core; `index` mirrors its nodes. `params.eviction_policy_config` holds RadixOptions."""

    def __init__(self, params: Any, components: dict[Any, Any]) -> None:
        self.options = RadixOptions(**(params.eviction_policy_config or {}))
        self.count = TreeCount()
        self.index: ReuseIndex[UnifiedTreeNode] = _index(self.options)
        self.trusted = True  # False: the index missed something and is out of step with the tree
        self.left_device: list[Callable[[UnifiedTreeNode], None]] = []  # who hears of nodes that leave the device
        self.evicted: Callable[[Tier, int, Explanation], None] | None = None  # who hears why a node goes
        self.by_lru: Callable[[], bool] = lambda: False  # SGLang's own order is wanted; the index only keeps step
        self.demoted = False  # the host tier has held what the device has not, since the last flush
        self._calm = PRESSED  # broadcasts since a victim was wanted
        super().__init__(replace(params, eviction_policy_config=None), components)

    def reset(self) -> None:
        super().reset()
        self.trusted, self.demoted = True, False
        self.tell(self.index.clear)

    def choose(self, options: RadixOptions) -> None:
        """Follow other options from the next `reset` on. What was learned of prompts and waits stays."""
        self.options, self.count, self.left_device = options, TreeCount(), []
        self.index = _index(options, learned=self.index.owners.learned, waits=self.index.owners.waits)

    def follow(self, options: RadixOptions) -> None:
        """Follow other options at once, with all nodes. Owners come back with the next calls of the running runs."""
        self.choose(options)
        self.trusted = True
        below = list(self.root_node.children.values())
        while below:
            node = below.pop()
            self.tell(self._report, node)
            below += node.children.values()

    def tell(self, what: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Tell the index something. If it raises, it is given up until the next flush: the cache must go on."""
        if self.trusted:
            try:
                what(*args, **kwargs)
            except Exception:
                self._give_up()

    def _give_up(self) -> None:
        self.trusted = False
        self.count.failures += 1
        logger.exception("the reuse index failed; evicting by LRU until the cache is flushed")

    def _update_evictable_leaf_sets(self, node: UnifiedTreeNode) -> None:
        # Several times a node and call: no `tell`, and nothing twice.
        if node is self.root_node:
            super()._update_evictable_leaf_sets(node)
            return
        state = self.leaf(node)
        if self.trusted:
            try:
                self._say(node, state)
            except Exception:
                self._give_up()

    def _report(self, node: UnifiedTreeNode) -> None:
        self._say(node, self.state_of(node))

    def _say(self, node: UnifiedTreeNode, state: int) -> None:
        if not self.index.report(node, state):
            self.index.add(node, len(node.key), None if node.parent is self.root_node else node.parent)
            self.index.report(node, state)
        if state & ~HOST_FREE == HOST_HELD:
            self.demoted = True

    def _release_full_host_duplicate(self, node: UnifiedTreeNode, *args: Any, **kwargs: Any) -> None:
        super()._release_full_host_duplicate(node, *args, **kwargs)
        self.tell(self._report, node)

    def _remove_leaf_from_parent(self, node: UnifiedTreeNode) -> None:
        super()._remove_leaf_from_parent(node)
        self.tell(self.index.remove, node)
        for hear in self.left_device:
            self.tell(hear, node)

    def _demote(self, node: UnifiedTreeNode, *args: Any, **kwargs: Any) -> None:
        super()._demote(node, *args, **kwargs)
        for hear in self.left_device:
            self.tell(hear, node)

    def pressed(self) -> bool:
        """Victims were wanted lately, counted in calls of this method: one a broadcast, on every rank."""
        self._calm += 1
        return self._calm <= PRESSED

    def victims(self, tier: Tier) -> Generator[UnifiedTreeNode, None, None]:
        """Evictable leaves of `tier`, the one to go next first; close it. Raises what the index raises."""
        self._calm = 0
        leaves = self.evictable_device_leaves if tier is Tier.DEVICE else self.evictable_host_leaves
        walk: Any = self.index.victims(tier)
        try:
            for node in walk:
                if node in leaves:
                    yield node
                else:  # SGLang takes a node that it locks out of the set without a word
                    self._report(node)
        finally:
            walk.close()

    def note(self, tier: Tier, node: UnifiedTreeNode, reason: Reason) -> None:
        """`node` goes now."""
        self.count.evicted_tokens[tier][reason] += len(node.key)
        if self.options.facts and (why := self.index.explain(node)) is not None:
            self.count.recent.append((tier.name.lower(), len(node.key), reason, round(why.key[1], 6)))
            if self.evicted is not None:
                self.evicted(tier, len(node.key), why)

    def cut_tail(self, node: UnifiedTreeNode, tokens: int, actions: list[Any]) -> None:
        """Split an evictable leaf so that `node` is only its last `tokens` tokens. Nobody has used either half now."""
        used = node.last_access_time
        head, action = self._split_node(node.key, node, len(node.key) - tokens)
        head.last_access_time = node.last_access_time = used
        self.count.partial += 1
        if action is not None:
            actions.append(action)


class OwnedFullComponent(FullComponent):
    """SGLang's full-attention component with the victims of `OwnedTreeCore.index`, one at a time."""

    def __init__(self, cache: Any, params: Any) -> None:
        super().__init__(cache, params)
        self.shortfall: int | None = None  # tokens that the eviction under way is really for, if the cache said so
        self.retired_only = False  # the eviction under way must not touch active nodes
        self._victims: Generator[UnifiedTreeNode, None, None] | None = None

    def redistribute_on_node_split(self, new_parent: UnifiedTreeNode, child: UnifiedTreeNode) -> None:
        super().redistribute_on_node_split(new_parent, child)
        self.tree_core.tell(self.tree_core.index.split, child, new_parent, len(new_parent.key))

    def _evict_device_start(self, request_cnt: int) -> None:
        core = self.tree_core
        if not core.trusted or core.by_lru():
            super()._evict_device_start(0 if self.retired_only else request_cnt)
            return
        self._evict_device_request_cnt = request_cnt
        self._victims = core.victims(Tier.DEVICE)

    def _evict_device_next_node(
        self, tracker: Any, device_frees: Any, host_frees: Any, cache_actions: list[Any]
    ) -> int | None:
        if self._victims is not None:
            if tracker[FULL] >= self._evict_device_request_cnt:
                return None
            victim = self._next(self._victims)
            if victim is not None and (victim[1] == "retired" or not self.retired_only):
                return self._chosen(*victim, tracker[FULL], cache_actions)
            self.tree_core.tell(self._victims.close)
            self._victims = None
            # Whatever else is evictable, the index does not know of: in SGLang's own order.
            super()._evict_device_start(0 if self.retired_only else self._evict_device_request_cnt)
        return super()._evict_device_next_node(tracker, device_frees, host_frees, cache_actions)

    def _next(self, victims: Generator[UnifiedTreeNode, None, None]) -> tuple[UnifiedTreeNode, Reason] | None:
        """The next victim, and why; None if there is none, or the policy raises."""
        try:
            node = next(victims, None)
            return None if node is None else (node, self.tree_core.index.reason(node))
        except Exception:
            count = self.tree_core.count
            count.fallbacks += 1
            if count.fallbacks & (count.fallbacks - 1) == 0:  # 1, 2, 4, 8 ...
                logger.exception("no victims from the reuse index (%d times so far); evicting by LRU", count.fallbacks)
            return None

    def _evict_device_end(self) -> None:
        if self._victims is not None:
            self.tree_core.tell(self._victims.close)
            self._victims = None
        super()._evict_device_end()

    def _chosen(self, node: UnifiedTreeNode, reason: Reason, freed: int, cache_actions: list[Any]) -> int:
        core, part = self.tree_core, self.tree_core.options.partial_tokens
        if part and reason != "retired" and len(core.components) == 1:
            asked = self._evict_device_request_cnt if self.shortfall is None else self.shortfall
            take = -(-max(asked - freed, part) // core.page_size) * core.page_size
            if len(node.key) - take >= part:
                core.cut_tail(node, take, cache_actions)
        core.tell(core.note, Tier.DEVICE, node, reason)
        return int(node.id)

    def drive_host_eviction(
        self, num_tokens: int, tracker: Any, device_frees: Any, host_frees: Any, cache_actions: list[Any]
    ) -> None:
        core = self.tree_core
        if core.trusted and not core.by_lru():
            victims = core.victims(Tier.HOST)
            while tracker[FULL] < num_tokens and (victim := self._next(victims)) is not None:
                node, reason = victim
                core.tell(core.note, Tier.HOST, node, reason)
                core._evict_host_leaf(node, tracker, device_frees, host_frees, cache_actions=cache_actions)
            core.tell(victims.close)
        if tracker[FULL] < num_tokens and core.evictable_host_leaves:
            super().drive_host_eviction(num_tokens, tracker, device_frees, host_frees, cache_actions)


def _index(options: RadixOptions, **known: Any) -> "ReuseIndex[UnifiedTreeNode]":
    bounds = OwnersOptions(max_age_s=options.max_age_s, rescore_s=options.rescore_s)
    return ReuseIndex(score_of(options.policy), bounds, recency=_recency, **known)


def _recency(node: UnifiedTreeNode) -> float:
    return node.last_access_time

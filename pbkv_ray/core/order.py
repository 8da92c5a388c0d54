"""The order in which evictable nodes go, per tier: lowest rank of the owner set first, then the longest unused.

Per tier and set: a heap of (recency, ticket, node). Per tier: a heap of (rank, recency of the set's oldest node,
ticket, set) over the sets that are retired or worth nothing. Both are lazy: a ticket that is no longer current is
dropped when it comes up. A recency that has grown since is put back; recency never shrinks, so the first current
entry is the oldest. Both cost O(log n), however many sets are worth nothing.

Sets of positive score are hundreds, and may all change with every tick: they are never sorted. The lowest of them is
found by one pass over an array (`Worth.lowest`), and only when nothing is retired or worthless.
"""

import heapq
from collections.abc import Callable, Hashable, Iterable
from math import inf
from typing import Generic, TypeVar

from pbkv_ray.core.nodes import OFFERED, TIERS, Node, Tier
from pbkv_ray.core.owners import Owners
from pbkv_ray.core.ownership import ACTIVE, RETIRED, OwnerSet, Rank

N = TypeVar("N", bound=Hashable)

_WORTHLESS: Rank = (ACTIVE, 0.0)


class Order(Generic[N]):
    """Both tiers' orders, and the nodes' membership in owner sets. `recency` is a node's current one."""

    def __init__(self, owners: Owners, recency: Callable[[Node[N]], float]) -> None:
        self._owners = owners
        self._recency = recency
        self._tickets = 0
        self._heaps: tuple[list[tuple[Rank, float, int, OwnerSet]], ...] = ([], [])

    # Which set a node belongs to

    def join(self, node: Node[N], owned: OwnerSet) -> None:
        """The node, of no set now, belongs to `owned`."""
        node.owned = owned
        self._owners.join(owned)
        for tier in TIERS:
            if node.resident[tier]:
                self._owners.count_tokens(owned, tier, node.tokens)
            if node.ticket[tier] > 0:
                self.enter(node, tier)
        self._note_host_only(node)

    def part(self, node: Node[N]) -> None:
        """The node leaves its set: `join` another, or be removed."""
        owned = node.owned
        for tier in TIERS:
            if node.ticket[tier] > 0:
                owned.live[tier] -= 1
            if node.resident[tier]:
                self._owners.count_tokens(owned, tier, -node.tokens)
        owned.host_only.pop(node, None)
        self._owners.leave(owned)

    def move(self, node: Node[N], owned: OwnerSet) -> None:
        if owned is not node.owned:
            self.part(node)
            self.join(node, owned)

    def hold(self, node: Node[N], tier: Tier, resident: bool) -> None:
        """The tier holds the node's KV, or does not any more."""
        if node.resident[tier] != resident:
            node.resident[tier] = resident
            self._owners.count_tokens(node.owned, tier, node.tokens if resident else -node.tokens)
            self._note_host_only(node)

    def _note_host_only(self, node: Node[N]) -> None:
        if node.resident[Tier.HOST] and not node.resident[Tier.DEVICE]:
            node.owned.host_only[node] = None
        else:
            node.owned.host_only.pop(node, None)

    # Which node goes next

    def enter(self, node: Node[N], tier: Tier) -> None:
        """The node is an evictable leaf of the tier, or has a new owner set."""
        owned = node.owned
        heap: list[tuple[float, int, Node[N]]] = owned.heaps[tier]
        owned.live[tier] += 1
        if len(heap) > 2 * owned.live[tier] + 16:
            heap[:] = [entry for entry in heap if entry[2].owned is owned and entry[2].ticket[tier] == entry[1]]
            heapq.heapify(heap)
        self._tickets += 1
        node.ticket[tier] = self._tickets
        heapq.heappush(heap, (self._recency(node), self._tickets, node))
        if heap[0][1] == self._tickets or owned.live[tier] == 1:
            self._post(owned, tier)

    def leave(self, node: Node[N], tier: Tier) -> None:
        """The node is not evictable any more. Also right for one that a walk has handed out."""
        if node.ticket[tier] > 0:
            node.owned.live[tier] -= 1
        node.ticket[tier] = 0

    def top(self, tier: Tier) -> Node[N] | None:
        """The node that goes next."""
        self._repost(self._owners.moved())
        heap = self._heaps[tier]
        node = self._first(heap, tier)
        if node is not None and heap[0][0][0] == RETIRED:
            return node  # nothing goes before it: scores can wait
        self.refresh()
        node = self._first(heap, tier)
        if node is not None:
            return node
        while (lowest := self._owners.worth.lowest(tier)) is not None:
            oldest = self._oldest(lowest, tier)
            if oldest is not None and oldest[0] == self._owners.worth.first[tier][lowest.slot]:
                return oldest[2]
            self._post(lowest, tier)
        return None

    def take(self, tier: Tier) -> Node[N] | None:
        """`top`, handed out: it is not in the order again until `enter`."""
        node = self.top(tier)
        if node is not None:
            heapq.heappop(node.owned.heaps[tier])
            node.owned.live[tier] -= 1
            node.ticket[tier] = OFFERED
            self._post(node.owned, tier)
        return node

    def refresh(self) -> None:
        """Brings scores up to date."""
        self._repost(self._owners.moved())
        self._repost(self._owners.rescore())

    def _repost(self, sets: list[OwnerSet]) -> None:
        for owned in sets:
            for tier in TIERS:
                if owned.live[tier]:
                    self._post(owned, tier)

    def _first(self, heap: list[tuple[Rank, float, int, OwnerSet]], tier: Tier) -> Node[N] | None:
        while heap:
            _, recency, ticket, owned = heap[0]
            if owned.posted[tier] != ticket:
                heapq.heappop(heap)
            elif (oldest := self._oldest(owned, tier)) is not None and oldest[0] == recency:
                return oldest[2]
            else:
                heapq.heappop(heap)
                self._post(owned, tier)
        return None

    def _post(self, owned: OwnerSet, tier: Tier) -> None:
        """Makes the set's oldest node of the tier known to the order; what was known before is void."""
        oldest = self._oldest(owned, tier)
        owned.posted[tier] = 0
        if owned.slot:
            self._owners.worth.first[tier][owned.slot] = inf if oldest is None else oldest[0]
        rank = self._owners.rank(owned)
        if oldest is None or rank > _WORTHLESS:
            return
        heap = self._heaps[tier]
        if len(heap) > 4 * self._owners.size + 64:
            heap[:] = [entry for entry in heap if entry[3].posted[tier] == entry[2]]
            heapq.heapify(heap)
        self._tickets += 1
        owned.posted[tier] = self._tickets
        heapq.heappush(heap, (rank, oldest[0], self._tickets, owned))

    def _oldest(self, owned: OwnerSet, tier: Tier) -> tuple[float, int, Node[N]] | None:
        heap: list[tuple[float, int, Node[N]]] = owned.heaps[tier]
        while heap:
            recency, ticket, node = heap[0]
            if node.ticket[tier] != ticket or node.owned is not owned:
                heapq.heappop(heap)
            elif (now := self._recency(node)) != recency:
                heapq.heapreplace(heap, (now, ticket, node))
            else:
                return heap[0]
        return None

    def check_invariants(self, nodes: Iterable[Node[N]]) -> None:
        """Raises AssertionError with what is wrong; `nodes` are all there are."""
        self.refresh()
        members: dict[OwnerSet, list[Node[N]]] = {}
        for node in nodes:
            members.setdefault(node.owned, []).append(node)
        for owned, those in members.items():
            assert owned.nodes == len(those), f"{owned.nodes} nodes counted, {len(those)} found in {owned.key}"
            host_only = {node for node in those if node.resident[Tier.HOST] and not node.resident[Tier.DEVICE]}
            assert set(owned.host_only) == host_only, f"host-only nodes of {owned.key}"
            for tier in TIERS:
                tokens = sum(node.tokens for node in those if node.resident[tier])
                assert owned.tokens[tier] == tokens, f"tokens of {owned.key}"
                live = [node for node in those if node.ticket[tier] > 0]
                assert owned.live[tier] == len(live), f"evictable nodes of {owned.key}"
                queued = {entry[2] for entry in owned.heaps[tier] if entry[2].ticket[tier] == entry[1]}
                assert queued >= set(live), f"evictable nodes missing from {owned.key}"
                if live and self._owners.rank(owned) <= _WORTHLESS:
                    assert owned.posted[tier], f"{owned.key} is not in the order"
                if live and owned.slot:
                    assert self._owners.worth.first[tier][owned.slot] <= min(map(self._recency, live))
        for tier in TIERS:
            retired = sum(owned.tokens[tier] for owned in members if owned.band == RETIRED)
            assert self._owners.retired_tokens[tier] == retired, f"retired tokens of {tier.name}"

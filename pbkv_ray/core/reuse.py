"""ReuseIndex: which KV-cache node goes next. Read this first to change the policy; scores are in `core.scores`.

Theory of operation
1. A node belongs to exactly one owner set (`core.owners`). Sets have a rank; nodes of a set have only recency.
2. Order, lower goes first: rank of the set, then recency of the node, over all sets of equal rank.
       (0, owning runs)   retired: every owning run has ended; private before shared
       (1, score)         active; nodes that nobody owns have score zero
   With neither forecasts nor endings every rank is (1, 0.0), so the order is LRU over all nodes, exactly.
3. Only evictable leaves of a tier are in that order: leaves first, locked nodes never. The engine says which they
   are (`report`), also while a walk is under way: a parent may become a leaf.
4. A run that changes re-ranks its sets, not its nodes. How the lowest is found: `core.order`; what a set is worth:
   `core.worth`. Nothing here reads a clock: `tick` brings the broadcast one.
5. What was said of nodes is taken in when somebody asks (`core.backlog`): a call says much that its end undoes.

Every method takes ids that it does not know as news from a race: no-ops, counted. Single-threaded.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Generic, TypeVar

from pbkv_ray.core.backlog import FREE, HELD, Backlog, state_of
from pbkv_ray.core.forecast import Forecast
from pbkv_ray.core.ghost import LearnedReuse
from pbkv_ray.core.nodes import OFFERED, Explanation, IndexCount, Node, Reason, Tier
from pbkv_ray.core.order import Order
from pbkv_ray.core.owners import Owners, OwnersOptions
from pbkv_ray.core.ownership import RETIRED, OwnerSet
from pbkv_ray.core.rates import depth_class
from pbkv_ray.core.scores import Score
from pbkv_ray.core.waits import WaitingTimes
from pbkv_ray.errors import InputError

__all__ = ["Explanation", "IndexCount", "Reason", "ReuseIndex", "Tier"]

N = TypeVar("N", bound=Hashable)


class ReuseIndex(Generic[N]):
    """One engine's nodes. `N` is any hashable; the engine's own nodes do.

    recency: reads a node's recency from the engine (a growing number, never shrinking). None: the index counts
             uses itself; then `touch` and `use` are what makes a node recent.
    """

    def __init__(
        self,
        score: Score,
        options: OwnersOptions | None = None,
        *,
        recency: Callable[[N], float] | None = None,
        learned: LearnedReuse | None = None,
        waits: WaitingTimes | None = None,
    ) -> None:
        self.owners = Owners(score, options or OwnersOptions(), learned, waits)
        self.count = IndexCount()
        self._nodes: dict[N, Node[N]] = {}
        self._read = recency
        self._uses, self._walking = 0.0, 0
        self._order = Order[N](self.owners, self._recency)
        self._backlog = Backlog[N](self.owners, self._order)
        self.owners.ending = self._backlog.settle

    def __len__(self) -> int:
        return len(self._nodes)

    def __contains__(self, node: N) -> bool:
        return node in self._nodes

    # The tree

    def add(self, node: N, tokens: int, parent: N | None = None) -> None:
        """A new leaf under `parent` (None: under the root, which is no node). Nobody owns it, no tier holds it."""
        if node in self._nodes:
            raise InputError(f"node {node!r} is in the index already; remove it first")
        above = None if parent is None else self._nodes.get(parent)
        if parent is not None and above is None:
            self.count.unknown_nodes += 1
        new = Node(node, tokens, above, self.owners.nobody, self._now_used())
        if above is not None:
            above.children += 1
        self._nodes[node] = new
        self._order.join(new, self._at_depth(self.owners.nobody, new.depth))

    def split(self, node: N, new_parent: N, tokens: int) -> None:
        """`new_parent` takes the first `tokens` tokens of `node`, its owners, its tiers and its place in the tree.

        Neither is an evictable leaf of a tier until `set_tier` says so, except that `node` stays what it was.
        """
        child = self._nodes.get(node)
        if child is None or not 0 < tokens < child.tokens:
            self.count.split_mismatches += 1
            return
        self._backlog.settle()
        upper = Node(new_parent, tokens, child.parent, child.owned, child.recency)
        upper.resident, upper.children = list(child.resident), 1
        upper.told = child.told & sum(HELD)
        self._nodes[new_parent] = upper
        self._order.join(upper, child.owned)  # first, or the set would be empty for a moment, and be forgotten
        self._order.part(child)
        child.parent = upper
        child.depth += tokens
        child.tokens -= tokens
        self._order.join(child, self._at_depth(child.owned, child.depth))

    def remove(self, node: N) -> None:
        """The node is in no tier and not in the tree any more. Children go first (InputError)."""
        gone = self._nodes.get(node)
        if gone is None:
            self.count.unknown_nodes += 1
            return
        if gone.children:
            raise InputError(f"node {node!r} still has {gone.children} children; remove them first")
        self._backlog.settle()
        del self._nodes[node]
        self._order.part(gone)
        gone.ticket, gone.gone = [0, 0], True
        if gone.parent is not None:
            gone.parent.children -= 1

    def clear(self) -> None:
        """The cache was emptied. Runs, forecasts and what was learned stay."""
        self._backlog.forget()
        for node in self._nodes.values():
            self._order.part(node)
            node.ticket, node.gone, node.parent = [0, 0], True, None
        self._nodes.clear()

    def set_tier(self, node: N, tier: Tier, *, resident: bool, evictable: bool) -> None:
        """Whether `tier` holds the node's KV, and whether it may be evicted from it now (a leaf there, unlocked)."""
        known = self._nodes.get(node)
        if known is None:
            self.count.unknown_nodes += 1
            return
        other = known.told & ~(HELD[tier] | FREE[tier])
        self._told(known, other | state_of(tier, resident=resident, evictable=evictable))

    def report(self, node: N, state: int) -> bool:
        """`set_tier` of both tiers: bits of `core.backlog`. False for a node that is not in the index."""
        known = self._nodes.get(node)
        if known is None:
            return False
        self._told(known, state)
        return True

    def _told(self, node: Node[N], state: int) -> None:
        if self._backlog.told(node, state) and self._walking:
            self._backlog.settle()  # who walks must see a node that was locked and released as a new one

    # Use

    def touch(self, node: N) -> None:
        """Somebody matched the node; it and its ancestors are recent. Only for an index that counts uses itself."""
        at: Node[N] | None = self._nodes.get(node)
        if at is None:
            self.count.unknown_nodes += 1
        recency, down = self._now_used(), 0
        while at is not None:
            at.recency = max(at.recency, recency - 1e-5 * down)
            at, down = at.parent, down + 1

    def call(
        self,
        run: str,
        agent: str,
        *,
        workflow: str = "",
        blocks: Sequence[int] | None = None,
        at_s: float | None = None,
    ) -> None:
        """A call of `agent` in `run` begins, once per call. Teaches waiting times, and reuse from its prompt.

        blocks: prefix-chained ids of the prompt's full blocks (ghost.block_hashes of `learned.block_tokens` tokens).
        at_s: on the broadcast clock; None: the last `tick`.
        """
        active = self.owners.run(run, workflow)
        if active is None:
            self.owners.count.late_calls += 1
            return
        if at_s is not None:
            self.tick(at_s)
        if self._backlog.concerns(active):  # it is of the call before
            self._backlog.settle()
        self.owners.called(active, agent, blocks)

    def answered(self, run: str, at_s: float) -> None:
        """A call of the run ended at `at_s` on the broadcast clock."""
        self.tick(at_s)
        self.owners.answered(run)

    def use(self, node: N, run: str | None, agent: str = "", *, workflow: str = "") -> None:
        """The prompt (or output) of a call ends in `node`: it and all its ancestors are the run's now.

        Called at admission with the deepest matched node and again when the call's tokens are inserted. What the
        agent read before and this path leaves is no longer fresh. `run` None is foreign traffic.
        """
        deepest = self._nodes.get(node)
        if deepest is None:
            self.count.unknown_nodes += 1
            return
        if self._read is None:
            self.touch(node)
        active = None if run is None else self.owners.run(run, workflow)
        if active is not None:
            self._backlog.use(active, self.owners.bit(active, agent), deepest)
            return
        self._backlog.settle()
        self.owners.count.late_calls += run is not None
        self._backlog.mark(deepest, self.owners.add_foreign if run is None else self.owners.add_late)

    # Runs

    def update(self, run: str, forecast: Forecast, *, version: int, at_s: float, workflow: str = "") -> None:
        """What `run` is expected to call next, made at `at_s`. Older versions and ended runs are ignored, counted."""
        self.tick(at_s)
        active = self.owners.run(run, workflow)
        if active is None:
            self.owners.count.late_forecasts += 1
            return
        self.owners.forecast(active, forecast, version, at_s)

    def end(self, run: str, at_s: float | None = None) -> None:
        """The run has ended; what only ended runs own goes first from now on. Idempotent."""
        if at_s is not None:
            self.tick(at_s)
        self.owners.end(run)

    def tick(self, at_s: float) -> None:
        """The broadcast clock (seconds): of the last hint, or SGLang's step counter. Never a rank's own clock."""
        self.owners.tick(at_s)

    # Victims

    def victims(self, tier: Tier) -> Iterator[N]:
        """Evictable leaves of `tier`, lowest first, for one eviction pass: one at a time, then `close()` it.

        The caller evicts each node before it asks for the next, and reports what that changed with `set_tier`,
        `split` and `remove`; parents that become leaves take their place in the order. A node that the caller
        could not evict is not offered again in this pass, and is back in the order once the pass is closed.
        """
        offered: list[Node[N]] = []
        self._walking += 1
        try:
            self._backlog.settle()
            while (node := self._order.take(tier)) is not None:
                offered.append(node)
                self.count.evictions[self._reason(node.owned)] += 1
                yield node.id
                self._backlog.settle()
        finally:
            self._walking -= 1
            self._backlog.settle()
            for node in offered:
                if node.ticket[tier] == OFFERED:
                    self.count.evictions[self._reason(node.owned)] -= 1
                    self._order.enter(node, tier)

    def peek(self, tier: Tier) -> N | None:
        """The next victim; nothing changes."""
        self._backlog.settle()
        return None if (node := self._order.top(tier)) is None else node.id

    def explain(self, node: N) -> Explanation | None:
        """Where the node stands in the order, and why; None if it is unknown."""
        if (known := self._nodes.get(node)) is None:
            return None
        self._settled()
        owned = known.owned
        owners = tuple(
            (use.run.run_id, tuple(name for name, bit in use.run.agents.items() if ever >> bit & 1))
            for use, (_, ever, *_) in zip(owned.uses, owned.owners, strict=True)
        )
        key = (*self.owners.rank(owned), self._recency(known))
        return Explanation(key, self._reason(owned), owners, owned.ended, bool(owned.popular))

    def reason(self, node: N) -> Reason:
        """Why the node would go, for the report of its eviction."""
        self._backlog.settle()
        return "recency" if (known := self._nodes.get(node)) is None else self._reason(known.owned)

    # What a tier holds

    def retired_tokens(self, tier: Tier) -> int:
        """Tokens of retired nodes in `tier`, leaves or not."""
        self._backlog.settle()
        return self.owners.retired_tokens[tier]

    def residency(self) -> dict[str, tuple[int, int]]:
        """Run -> (device, host tokens) of the nodes that it owns, shared ones included."""
        self._backlog.settle()
        return self.owners.residency()

    def next_call(self, node: N) -> float:
        """Paper Eq. 1, Value(node): how often the next calls of its active owners are expected to use it."""
        if (known := self._nodes.get(node)) is None:
            return 0.0
        self._settled()
        return self.owners.worth.next_call(known.owned, self.owners.now_s)

    def host_only(self) -> Iterator[tuple[float, N]]:
        """(Value, node) of nodes that the host holds and the device does not, greatest value first; none of zero."""
        self._settled()
        worth, now_s = self.owners.worth, self.owners.now_s
        held: dict[float, list[OwnerSet]] = defaultdict(list)
        for owned in (s for s in self.owners.sets() if s.host_only):
            held[worth.next_call(owned, now_s)].append(owned)
        for value in sorted(filter(lambda value: value > 0, held), reverse=True):
            nodes: Iterator[Node[N]] = (node for owned in held[value] for node in owned.host_only)
            # Not in the order in which they were taken in: one rank of several asks more often than the others.
            yield from ((value, n.id) for n in sorted(nodes, key=lambda n: (n.depth, -self._recency(n))))

    def load_path(self, node: N) -> list[tuple[N, int]]:
        """See `Node.load_path`; empty for an unknown node."""
        self._backlog.settle()
        return [] if (known := self._nodes.get(node)) is None else known.load_path()

    # Bookkeeping

    def _settled(self) -> None:
        self._backlog.settle()
        self._order.refresh()

    def _now_used(self) -> float:
        self._uses += 1.0
        return self._uses

    def _recency(self, node: Node[N]) -> float:
        return node.recency if self._read is None else self._read(node.id)

    def _reason(self, owned: OwnerSet) -> Reason:
        if owned.band == RETIRED:
            return "retired"
        return "scored" if self.owners.worth.of(owned) > 0 else "recency"

    def _at_depth(self, owned: OwnerSet, tokens: int) -> OwnerSet:
        return self.owners.at_depth(owned, depth_class(tokens)) if self.owners.score.learns else owned

    def check_invariants(self) -> None:
        """Raises AssertionError with what is wrong; O(nodes)."""
        self._backlog.settle()
        self.owners.check_invariants()
        self._order.check_invariants(self._nodes.values())
        children = Counter(node.parent for node in self._nodes.values())
        for node in self._nodes.values():
            assert not node.gone
            assert node.children == children[node], f"children of {node.id!r}"
            if node.parent is not None:
                assert self._nodes.get(node.parent.id) is node.parent, f"parent of {node.id!r} is not in the tree"
                assert node.depth == node.parent.depth + node.parent.tokens, f"depth of {node.id!r}"

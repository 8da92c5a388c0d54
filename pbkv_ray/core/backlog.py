"""What an engine has told the index and nobody has asked about yet: taken in when somebody does, each thing once.

A call locks and unlocks its path several times, and says at admission, after every chunk and at its end whose the
path is. Only the last of it counts until a victim is wanted, a node splits, or the run calls again or ends: so
changes of nodes are kept by node, uses by run, and `settle` takes them in. The result is what taking each in at once
would have given: readings of different runs do not depend on their order, and a use of a longer path contains that
of a shorter one by the same agent. At most one entry a node of the tree and one a run: nothing is dropped.
"""

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from pbkv_ray.core.nodes import TIERS, Node, Tier
from pbkv_ray.core.order import Order
from pbkv_ray.core.owners import Owners
from pbkv_ray.core.ownership import OwnerSet, Run

N = TypeVar("N", bound=Hashable)

# What the engine says of a node, bits of `Node.told`: which tier holds its KV, and may evict it from there now.
DEVICE_HELD, DEVICE_FREE, HOST_HELD, HOST_FREE = 1, 2, 4, 8
HELD, FREE = (DEVICE_HELD, HOST_HELD), (DEVICE_FREE, HOST_FREE)  # by tier


class Backlog(Generic[N]):
    def __init__(self, owners: Owners, order: Order[N]) -> None:
        self._owners, self._order = owners, order
        self._changed: dict[Node[N], None] = {}
        self._uses: dict[Run, tuple[int, Node[N]]] = {}  # the agent's bit, the deepest node of its prompt
        self._walks = 0

    def __len__(self) -> int:
        return len(self._changed) + len(self._uses)

    # What is told

    def told(self, node: Node[N], state: int) -> bool:
        """The engine says `state` (bits, see above) of the node; whether that is news."""
        if node.told == state:
            return False
        node.told = state
        self._changed[node] = None
        return True

    def use(self, run: Run, bit: int, deepest: Node[N]) -> None:
        """A prompt of the run's agent `bit` ends in `deepest`."""
        waiting = self._uses.get(run)
        if waiting is not None and not (waiting[0] == bit and _above(waiting[1], deepest)):
            self._use(run, *waiting)
        self._uses[run] = bit, deepest

    def concerns(self, run: Run) -> bool:
        """A use of the run waits to be taken in."""
        return run in self._uses

    def mark(self, deepest: Node[N], change: Callable[[OwnerSet], OwnerSet]) -> None:
        """Changes the sets of a whole path at once; `settle` before."""
        at: Node[N] | None = deepest
        while at is not None:
            self._order.move(at, change(at.owned))
            at = at.parent

    # Taking it in

    def settle(self) -> None:
        if self._uses:  # first: then a node enters the order of the set that it stays in
            uses, self._uses = self._uses, {}
            for run, (bit, deepest) in uses.items():
                self._use(run, bit, deepest)
        if self._changed:
            changed, self._changed = self._changed, {}
            for node in changed:
                self._change(node)

    def forget(self) -> None:
        """The cache was emptied."""
        self._changed.clear()
        self._uses.clear()

    def _change(self, node: Node[N]) -> None:
        order = self._order
        for tier in TIERS:
            order.hold(node, tier, bool(node.told & HELD[tier]))
            if node.told & FREE[tier]:
                if node.ticket[tier] == 0:
                    order.enter(node, tier)
            elif node.ticket[tier] != 0:
                order.leave(node, tier)

    def _use(self, run: Run, bit: int, deepest: Node[N]) -> None:
        owners, order = self._owners, self._order
        self._walks += 1
        moves: dict[tuple[OwnerSet, bool], OwnerSet] = {}
        at: Node[N] | None = deepest
        while at is not None:
            at.walk = self._walks
            public = at.depth + at.tokens <= run.shared_tokens
            target = moves.get((at.owned, public))
            if target is None:
                target = moves[at.owned, public] = owners.add_owner(at.owned, run, bit, public)
            order.move(at, target)
            at = at.parent
        tip, run.tips[bit] = run.tips.get(bit), deepest
        self._turn(tip, self._walks, run, bit, fresh=False)
        if bit in run.leaves and tip is not None:
            run.leaves.remove(bit)
            before, run.older_tips[bit] = run.older_tips.get(bit), tip
            self._walks += 1
            self._turn(tip, 0, run, bit, older=True)
            self._turn(before, self._walks, run, bit, older=False)

    def _turn(
        self, tip: Node[N] | None, walk: int, run: Run, bit: int, fresh: bool | None = None, older: bool | None = None
    ) -> None:
        """Changes what is known of the path that ends in `tip`, up to the first node of that walk (0: all of it)."""
        while tip is not None and (tip.gone or walk == 0 or tip.walk != walk):
            if not tip.gone:
                tip.walk = self._walks
                self._order.move(tip, self._owners.turn(tip.owned, run, bit, fresh, older))
            tip = tip.parent


def _above(upper: Node[N], node: Node[N]) -> bool:
    """`upper` is the node or one of its ancestors."""
    at: Node[N] | None = node
    while at is not None and at.depth > upper.depth:
        at = at.parent
    return at is upper


def state_of(tier: Tier, *, resident: bool, evictable: bool) -> int:
    """The bits of one tier."""
    return resident * HELD[tier] | evictable * FREE[tier]

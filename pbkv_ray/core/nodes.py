"""A KV-cache node as the index knows it, the tiers that may hold it, and why it goes."""

from collections.abc import Hashable
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Generic, Literal, TypeVar

from pbkv_ray.core.ownership import OwnerSet

N = TypeVar("N", bound=Hashable)

OFFERED = -1  # ticket of a node that a walk has handed out: evictable, and not in the order


class Tier(IntEnum):
    DEVICE = 0
    HOST = 1


TIERS = (Tier.DEVICE, Tier.HOST)


class Node(Generic[N]):
    """What the index knows of one KV-cache node."""

    __slots__ = (
        "children", "depth", "gone", "id", "owned", "parent", "recency", "resident", "ticket", "tokens", "told",
        "walk",
    )  # fmt: skip

    def __init__(self, id: N, tokens: int, parent: "Node[N] | None", owned: OwnerSet, recency: float) -> None:
        self.id = id
        self.tokens = tokens
        self.parent = parent
        self.depth: int = 0 if parent is None else parent.depth + parent.tokens  # tokens before it
        self.owned = owned
        self.recency = recency
        self.children = 0
        self.gone = False
        self.walk = 0
        self.told = 0  # what the engine said last of its tiers, see core.backlog
        self.ticket = [0, 0]  # of its entry in its set's heap; 0: not an evictable leaf of the tier
        self.resident = [False, False]

    def load_path(self) -> list[tuple[N, int]]:
        """(node, tokens) from the first ancestor that the device lacks down to this one. Empty: not to be loaded."""
        at: Node[N] | None = self
        path: list[tuple[N, int]] = []
        while at is not None and not at.resident[Tier.DEVICE]:
            if not at.resident[Tier.HOST]:
                return []
            path.append((at.id, at.tokens))
            at = at.parent
        return path[::-1]


Reason = Literal["retired", "scored", "recency"]


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why a node goes when it goes. `key` is what nodes are ordered by, lower first."""

    key: tuple[int, float, float]  # 0 retired or 1 active; owning runs or score; recency
    reason: Reason
    owners: tuple[tuple[str, tuple[str, ...]], ...]  # active runs, and the agents that have read the node
    ended_runs: int
    popular: bool
    depth: int = 0  # tokens before the node


@dataclass(slots=True)
class IndexCount:
    unknown_nodes: int = 0  # named by an event, not (or no longer) in the tree
    split_mismatches: int = 0
    evictions: dict[str, int] = field(default_factory=lambda: {"retired": 0, "scored": 0, "recency": 0})

"""A KV-cache node as the index knows it, and the tiers that may hold it."""

from collections.abc import Hashable
from enum import IntEnum
from typing import Generic, TypeVar

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
        "children", "depth", "gone", "id", "owned", "parent", "recency", "resident", "ticket", "tokens", "walk",
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
        self.ticket = [0, 0]  # of its entry in its set's heap; 0: not an evictable leaf of the tier
        self.resident = [False, False]

"""`engine.prefetcher` in simulated time: the same plans, carried out with the same calls, timed by the cost model."""

from typing import Any

from pbkv_ray.core.prefetch import Load, Prefetcher, PrefetchOptions
from pbkv_ray.replay.cost import Cost
from pbkv_ray.replay.tree import Tree


class SimulatedPrefetch:
    """One replica's prefetch. A stretch of pure-decode steps counts as one long step."""

    def __init__(self, tree: Tree, unit_tokens: int, aggressive: float) -> None:
        self._tree, self._unit = tree, unit_tokens
        self._core: Any = tree.cache.tree_core
        self._plan: Prefetcher[Any] = Prefetcher(self._core.index, PrefetchOptions(aggressive, burst_steps=1.0))
        self._core.left_device.append(self._plan.left)
        self._aggressive = aggressive > 0
        self._loading: list[Load[Any]] = []
        self.ends_s = 0.0  # when what is on the way will be there
        tree.cache.prefetcher = self

    @property
    def count(self) -> Any:
        return self._plan.count

    def used(self, node: Any) -> None:
        """Called by the cache at admission: a request's prompt ends in `node`."""
        while node is not None and node is not self._core.root_node:
            self._plan.used(node)
            node = node.parent

    def finished(self, ack: Any) -> None:
        """Called by the cache; transfers are timed here instead."""

    def settle(self, now_s: float) -> None:
        if now_s >= self.ends_s and self._loading:
            for load in self._loading:
                for node in load.path:
                    self._plan.arrived(node)
            self._loading.clear()

    def decode(self, now_s: float, seconds: float, cost: Cost) -> None:
        """Decode steps of `seconds` in all are about to run."""
        self.settle(now_s)
        if self._loading:
            return
        tree, cache = self._tree, self._tree.cache
        self._plan.decoded(seconds)
        self._plan.transferred(self._unit, cost.load(self._unit))  # the engine knows it from requests' own loads
        loads = self._plan.plan(tree.free_units() * self._unit, tree.options.device_units * self._unit)
        started = [load for load in loads if self._queue(load)]
        if not started:
            return
        cache.ready_to_load_host_cache()
        cache.loading_check()
        self._loading = started
        self.ends_s = now_s + cost.load(sum(load.tokens for load in started))

    def _queue(self, load: Load[Any]) -> bool:
        tree, units = self._tree, load.tokens // self._unit
        short = units - tree.free_units()
        if short > 0:
            tree.cache.make_room(short, retired_only=not self._aggressive)
        if (
            load.node.id not in self._core._node_arena
            or tree.free_units() < units
            or not tree.cache.load_back(load.node.id)
        ):
            self._plan.failed(load)
            return False
        return True

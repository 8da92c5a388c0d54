"""SGLang's Python tree core, walking faster where nothing unusual lies on the way.

Our tree core has to be the Python one; most of what it costs beside the Rust core is its walk from the root at every
match and insert: slices of the key and of a tensor a node, several calls of Python functions a token window. Here
whole nodes that match go by in one comparison each; whatever is unusual (a split, an evicted node, duplicates to be
freed, several components, pairs of tokens as keys) is left to SGLang's own steps, from where the walk has come to.
Method by method this does what the stock one does in SGLang 0.5.23; `tests/shells/test_tree_walks.py` compares them.
"""

from typing import Any

from sglang.srt.mem_cache.unified_cache.components import BASE_COMPONENT_TYPE as FULL
from sglang.srt.mem_cache.unified_cache.components import get_and_increase_time_counter
from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeCore, UnifiedTreeNode

from pbkv_ray.core.backlog import DEVICE_FREE, DEVICE_HELD, HOST_FREE, HOST_HELD


class TreeWalks(UnifiedTreeCore):
    """`UnifiedTreeCore`, in all that can be seen."""

    def _insert_walk_step(self, state: Any) -> None:
        if len(self.components) > 1 or state.key.is_bigram or state.key.limit is not None:
            super()._insert_walk_step(state)
            return
        known = len(state.pending_actions)
        self._pass_overlaps(state)
        if len(state.pending_actions) == known:
            super()._insert_walk_step(state)

    def _pass_overlaps(self, state: Any) -> None:
        """Goes over nodes of which the key has all tokens and the request owns no duplicates. Stops behind the first
        that has something to be done for it."""
        key, params, node, at = state.key, state.params, state.node, 0
        ids, end, before = key.token_ids, len(key), state.total_prefix_length
        known = len(state.pending_actions)
        while at < end and len(state.pending_actions) == known:
            child = node.children.get(key.child_key_at(at, self.page_size))
            if child is None or child.component_data[FULL].value is None:
                break
            size = _whole(child, ids, at, end)
            if not size or before + at + size > params.prev_prefix_len:
                break
            child.last_access_time = get_and_increase_time_counter()
            if child.priority < state.priority:
                child.priority = state.priority
            node, at = child, at + size
            if before + at > params.inserted_len and self._inc_hit_count_and_check(child):
                state.pending_actions.append(self._build_backup_kv_action(child))
        if at:
            state.node, state.key, state.value = node, key[at:], state.value[at:]
            state.total_prefix_length = before + at

    def _match_prefix_helper(self, key: Any, params: Any) -> Any:
        if len(self.components) > 1 or key.is_bigram:
            return super()._match_prefix_helper(key, params)
        node = best = here = self.root_node
        ids, end, at, found, action = key.token_ids, len(key), 0, 0, None
        values: list[Any] = []
        on_device = 0
        while at < end:
            child = node.children.get(key.child_key_at(at, self.page_size))
            if child is None:
                break
            full = child.component_data[FULL]
            if full.value is None and full.host_value is None:
                break
            size = _whole(child, ids, at, end)
            if split := not size:
                size = child.key.match_at(key, at, page_size=self.page_size)
                child, action = self._split_node(child.key, child, size)
                full = child.component_data[FULL]
            node, at, found = child, at + size, found + size
            if full.value is not None:
                values.append(full.value)
                best = here = child
                on_device = len(values)
            elif self.enable_hicache and full.host_value is not None:
                best = child
            if split:
                break
        last = None if node is self.root_node else node.id
        return self._match_post_processor(params, values, best, here, on_device, found, action, last, ())

    def leaf(self, node: UnifiedTreeNode) -> int:
        """Keeps the sets of evictable leaves for a node that is not the root. Returns its state, in the bits of
        `core.backlog`."""
        if len(self.components) > 1:
            super()._update_evictable_leaf_sets(node)
            return self.state_of(node)
        full = node.component_data[FULL]
        state = 0 if full.host_value is None else HOST_HELD
        if full.value is not None:
            self.evictable_host_leaves.discard(node)
            if full.lock_ref > 0 or _any_on_device(node):
                self.evictable_device_leaves.discard(node)
                return state | DEVICE_HELD
            self.evictable_device_leaves.add(node)
            return state | DEVICE_HELD | DEVICE_FREE
        self.evictable_device_leaves.discard(node)
        if not state or full.lock_ref > 0 or full.host_lock_ref > 0 or node.children:
            self.evictable_host_leaves.discard(node)
            return state
        self.evictable_host_leaves.add(node)
        return HOST_HELD | HOST_FREE

    def state_of(self, node: UnifiedTreeNode) -> int:
        """Where the node is held, and of which tier it is an evictable leaf."""
        full = node.component_data[FULL]
        state = DEVICE_HELD if full.value is not None else 0
        state |= HOST_HELD if full.host_value is not None else 0
        state |= DEVICE_FREE if node in self.evictable_device_leaves else 0
        return state | (HOST_FREE if node in self.evictable_host_leaves else 0)


def _any_on_device(node: UnifiedTreeNode) -> bool:
    # any() with a generator would cost as much as all the rest of `leaf`.
    for child in node.children.values():  # noqa: SIM110
        if child.component_data[FULL].value is not None:
            return True
    return False


def _whole(child: UnifiedTreeNode, ids: Any, at: int, end: int) -> int:
    """Tokens of the child, if ids[at:end] begins with all of them; else 0."""
    mine = child.key.token_ids
    size = len(mine)
    if child.key.limit is None and at + size <= end and mine == ids[at : at + size]:
        return size
    return 0

"""How full an engine's two pools are, for those who watch. Reads SGLang's allocators; changes nothing."""

from typing import Any

from pbkv_ray.core.reuse import Tier


def pools(cache: Any) -> dict[str, int]:
    """Tokens: `device_pool` in all, of which `device_free` and `device_retired`; the same of `host_`, if there is a
    host tier. `cache` is `engine.radix.OwnedRadixCache`."""
    index, allocator = cache.tree_core.index, cache.token_to_kv_pool_allocator
    found = {
        "device_pool": int(allocator.size),
        "device_free": int(allocator.available_size()),
        "device_retired": int(index.retired_tokens(Tier.DEVICE)),
    }
    host = getattr(cache.cache_controller, "mem_pool_host", None)
    if host is not None:
        found |= {
            "host_pool": int(host.size),
            "host_free": int(host.available_size()),
            "host_retired": int(index.retired_tokens(Tier.HOST)),
        }
    return found

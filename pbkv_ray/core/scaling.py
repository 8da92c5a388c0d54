"""How many engine replicas there should be: by the prompt tokens that wait to be computed, not by requests.

A call with its whole prompt in the cache costs next to nothing and one with a cold 30k-token prompt costs seconds, so
the number of requests says little. Uncached tokens in the queues are the work that is behind. When nothing waits, the
calls that run say how many replicas can go: only as many as leave the others room.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from pbkv_ray.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Load:
    """Of one replica: uncached prompt tokens that wait for prefill, and calls that run."""

    queued_prefill_tokens: float
    running_calls: float


@dataclass(frozen=True, slots=True)
class ScalingOptions:
    """`queued_tokens`: a replica that has more waiting is behind. `max_running`: calls it runs at a time."""

    queued_tokens: int = 8_192
    max_running: int = 16
    idle_share: float = 0.25  # of queued_tokens: above it no replica goes
    full_share: float = 0.7  # of max_running: what the replicas that stay may be filled to
    growth: float = 2.0  # at most so many times the replicas at once; each brings an empty cache

    def __post_init__(self) -> None:
        if min(self.queued_tokens, self.max_running, self.idle_share, self.full_share) <= 0 or self.growth <= 1:
            raise ConfigError(f"{self} is no scaling rule; shares and sizes are above zero, growth is above one")


def wanted_replicas(loads: Sequence[Load], now: int, options: ScalingOptions) -> int:
    """Replicas wanted when `now` run, of which `loads` are known; `now` when none is. At least one."""
    if not loads or now < 1:
        return max(1, now)
    mean = sum(load.queued_prefill_tokens for load in loads) / len(loads)
    if mean > options.queued_tokens:
        return max(now + 1, min(math.ceil(now * mean / options.queued_tokens), math.ceil(now * options.growth)))
    if mean > options.idle_share * options.queued_tokens:
        return now
    running = sum(load.running_calls for load in loads) / len(loads) * now
    return max(1, min(now, math.ceil(running / (options.full_share * options.max_running))))

"""A fixed order of calls: the same for every policy, so that hit rates and shares of Belady can be compared."""

import heapq
import random
from dataclasses import dataclass

from pbkv_ray.replay.workload import Workload


@dataclass(frozen=True, slots=True)
class Timing:
    """A call takes output / decode_tokens_s seconds, then the run waits `wait_s` (uniform, s) for its tool unless
    the trace says for how long. Prefill takes no time: the order must not depend on hits."""

    decode_tokens_s: float = 40.0
    wait_s: tuple[float, float] = (1.0, 8.0)
    ramp_s: float = 20.0  # the first runs start within this time


@dataclass(frozen=True, slots=True)
class OrderedCall:
    at_s: float
    run: int
    call: int
    last: bool
    ends_s: float


def fixed_order(workload: Workload, concurrency: int, seed: int = 1, timing: Timing | None = None) -> list[OrderedCall]:
    """Closed loop, `concurrency` runs in flight; a run that ends makes room for the next."""
    timing, rng = timing or Timing(), random.Random(seed)
    waiting = list(range(len(workload.runs)))[::-1]
    queue: list[tuple[float, int, int]] = []
    for _ in range(min(concurrency, len(waiting))):
        heapq.heappush(queue, (rng.uniform(0, timing.ramp_s), waiting.pop(), 0))
    order: list[OrderedCall] = []
    while queue:
        at_s, run, i = heapq.heappop(queue)
        calls = workload.runs[run].calls
        last = i == len(calls) - 1
        ends_s = at_s + calls[i].output_tokens / timing.decode_tokens_s
        order.append(OrderedCall(at_s, run, i, last, ends_s))
        after = ends_s + rng.uniform(*timing.wait_s)
        if not last:
            known = calls[i + 1].wait_s
            if known is not None:
                after = ends_s + known
            heapq.heappush(queue, (after, run, i + 1))
        elif waiting:
            heapq.heappush(queue, (after, waiting.pop(), 0))
    return order

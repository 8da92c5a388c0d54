"""What waits to be told to one replica: coalesced, in order, kept until the replica has acknowledged it."""

from collections import OrderedDict
from collections.abc import Sequence
from itertools import islice

from pbkv_ray.core.actions import Action, RetireRun


class Outbox:
    """One entry a run: a newer action of the same run replaces the waiting one. An ending is never replaced.

    Beyond `capacity` the oldest forecasts go first, then the oldest endings; `dropped` counts both. A dropped
    forecast costs hits, a dropped ending makes the engine wait for the run's lease.
    """

    def __init__(self, capacity: int = 20_000) -> None:
        self._capacity = capacity
        self._waiting: OrderedDict[str, tuple[int, Action]] = OrderedDict()
        self._sequence = 0
        self.dropped = 0
        self.told_s = 0.0  # when its reader last got something, on the clock of whoever serves it

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, action: Action) -> None:
        waiting = self._waiting.get(action.run_id)
        if waiting is not None and isinstance(waiting[1], RetireRun):
            return
        self._sequence += 1
        self._waiting[action.run_id] = self._sequence, action
        self._waiting.move_to_end(action.run_id)
        if len(self._waiting) > self._capacity:
            victim = next(
                (run for run, (_, a) in self._waiting.items() if not isinstance(a, RetireRun)),
                next(iter(self._waiting)),
            )
            del self._waiting[victim]
            self.dropped += 1

    def take(self, acknowledged: int, limit: int = 512) -> tuple[int, Sequence[Action]]:
        """Forget what the replica has got, up to and including `acknowledged`; the next actions, oldest first,
        and the number to acknowledge when they have been applied."""
        while self._waiting and next(iter(self._waiting.values()))[0] <= acknowledged:
            self._waiting.popitem(last=False)
        following = list(islice(self._waiting.values(), limit))
        return (following[-1][0] if following else acknowledged), [action for _, action in following]

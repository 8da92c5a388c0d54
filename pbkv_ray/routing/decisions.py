"""Why each call went where it went: kept by the router of this process until the call's answer takes it along."""

import threading
from collections import OrderedDict

from pbkv_ray.core.routing import Decision

MAX_KEPT = 4_096  # calls that never end must not fill the table


class Decisions:
    """Routers run in a thread of their own, answers arrive in another."""

    def __init__(self, max_kept: int = MAX_KEPT) -> None:
        self._max_kept = max_kept
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, Decision] = OrderedDict()

    def keep(self, call_id: str, decision: Decision) -> None:
        with self._lock:
            self._kept[call_id] = decision
            if len(self._kept) > self._max_kept:
                self._kept.popitem(last=False)

    def take(self, call_id: str) -> Decision | None:
        with self._lock:
            return self._kept.pop(call_id, None)


DECISIONS = Decisions()  # one a process, as there is one router

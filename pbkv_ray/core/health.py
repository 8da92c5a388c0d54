"""How exactly an engine follows what is known of its runs. It never claims more than is so."""

from dataclasses import dataclass
from enum import IntEnum


class Following(IntEnum):
    """FALLBACK  least recently used decides: a stock policy, no hints (any more), or the policy is given up
    DEGRADED  hints are stale, or the policy failed a while ago and LRU decided for that moment
    EXACT     fresh hints decide
    """

    FALLBACK = 0
    DEGRADED = 1
    EXACT = 2


@dataclass(frozen=True, slots=True)
class HealthOptions:
    fresh_s: float = 15.0  # a replica asks for hints every five seconds at the latest
    void_s: float = 600.0  # forecasts are void then (RadixOptions.max_age_s)
    remembered_s: float = 600.0  # so long a failure is held against the policy


class Health:
    """One replica's. `by_score`: its policy looks at hints at all. Times are the caller's, of one clock."""

    def __init__(self, by_score: bool, options: HealthOptions | None = None) -> None:
        self._by_score = by_score
        self._options = options or HealthOptions()
        self._heard_s: float | None = None
        self._failed_s: float | None = None
        self._failures = 0
        self._trusted = True

    def heard(self, now_s: float) -> None:
        """The controller has answered, with hints or with nothing new."""
        self._heard_s = now_s

    def told(self, failures: int, trusted: bool, now_s: float) -> None:
        """The engine's word: how often its policy has failed since it started, and whether it is given up now."""
        if failures > self._failures:
            self._failed_s = now_s
        self._failures, self._trusted = failures, trusted

    def following(self, now_s: float, *, lru_in_charge: bool = False) -> Following:
        """`lru_in_charge`: somebody has put LRU in the policy's place."""
        options = self._options
        silent_s = None if self._heard_s is None else now_s - self._heard_s
        if not self._by_score or not self._trusted or lru_in_charge or silent_s is None or silent_s > options.void_s:
            return Following.FALLBACK
        failed = self._failed_s is not None and now_s - self._failed_s < options.remembered_s
        return Following.DEGRADED if failed or silent_s > options.fresh_s else Following.EXACT

"""How many runs may be in flight: found while serving, from what thrash costs. Pure; the caller brings the figures.

A limit is the cheap rival of every eviction policy: LRU with the right one loses little where prefill is the
bottleneck, and no order of eviction saves a live set of several pools. The right number depends on the policy, the
pool and on what the engine is short of: where tools and decode dominate, thrash is cheap and more runs are better.

So the rule watches one quantity, the share of the engine's time that goes into computing again what it had evicted.
Below `low` the limit grows by one, once the runs in flight have made `patience` of their usual calls: a run that was
let in shows what it costs only when it has grown. Above `high` it shrinks by one each time every run has called once.
How much could go wrong is known beforehand. With n runs a call takes the engine rest / n + prefill, and the rest,
decoding and waiting for tools, is what more runs share. At worst no prompt finds anything; as long as the prefill of
whole prompts takes no more time than the rest, waiting is taken to cost more than thrash could, whatever the policy.
Up to that number, `bearable`, the limit grows without asking what thrash costs, by a quarter a call at most, and thrash
does not shrink it below; it rests there while the number stays, and goes beyond as above once the number has been
under it for that long. It starts at the number of runs whose mean live set, half of what a run holds when it ends,
fits the pool. Only new runs are held back, never the calls of running ones.
"""

from dataclasses import dataclass

from pbkv_ray.errors import ConfigError

_PAUSE = 8.0  # times the mean gap between calls


@dataclass(frozen=True, slots=True)
class AdmissionOptions:
    """low, high: shares of time. patience: of a run's usual number of calls. cold_runs: the limit until the first
    run has ended. memory: ended runs that the means remember."""

    low: float = 0.10
    high: float = 0.20
    patience: float = 0.25
    cold_runs: int = 4
    most: int = 1_024
    memory: float = 32.0

    def __post_init__(self) -> None:
        if not 0 < self.low < self.high < 1 or self.cold_runs < 1 or self.most < 1:
            raise ConfigError(f"admission needs 0 < low < high < 1 and at least one run, got {self}")


class Admission:
    """The limit of one engine, or of several alike: then figures are sums over them. Single-threaded."""

    def __init__(self, pool_tokens: int, options: AdmissionOptions | None = None) -> None:
        """pool_tokens: device tokens in which running runs must live."""
        self.options = options or AdmissionOptions()
        self._pool = pool_tokens
        self._limit = float(self.options.cold_runs)
        self._footprint = 0.0  # mean over ended runs, tokens
        self._ended = 0.0
        self._calls_per_run = 0.0
        self._prompt_tokens = 0.0  # of a call, mean over ended runs
        self._count = self._token_s = self._flight = 0.0  # decaying sums over calls: how many, s a token, runs
        self._quiet = self._calls = self._served = 0  # calls since the limit grew, since it moved at all, and ever
        self._again_s = self._computed_s = self._span_s = 0.0  # decaying sums
        self._since_s: float | None = None
        self._adapted = False

    @property
    def limit(self) -> int:
        """Runs that may be in flight."""
        return max(1, int(self._limit))

    @property
    def thrash(self) -> float:
        """The share of recent time spent on computing again what had been there."""
        return self._again_s / self._span_s if self._span_s > 0 else 0.0

    @property
    def bearable(self) -> float:
        """Runs with which prefill would take half of the time if every prompt were computed from its start. 0 before a
        run has ended."""
        whole_s = self._token_s * self._prompt_tokens
        if whole_s <= 0 or self._span_s <= 0:
            return 0.0
        return self._flight / self._count * max(0.0, self._span_s - self._computed_s) / whole_s

    def called(self, again_s: float, computed_s: float, token_s: float, now_s: float, in_flight: int) -> None:
        """A call was served: its prefill took `computed_s`, `again_s` of it for tokens that the cache had held before;
        computing one token of such a prompt takes `token_s`."""
        if self._since_s is None:
            self._since_s = now_s
        keep = 1.0 - 0.5 / max(1, in_flight)  # remembers about two calls of every run
        self._again_s = keep * self._again_s + again_s
        self._computed_s = keep * self._computed_s + computed_s
        gap_s = max(0.0, now_s - self._since_s)
        # A pause says nothing of how busy the engine is when there are calls; runs that begin together are no pause.
        if self._served >= max(4, in_flight):
            gap_s = min(gap_s, _PAUSE * self._span_s / self._count)
        self._span_s = keep * self._span_s + gap_s
        self._count = keep * self._count + 1.0
        self._flight = keep * self._flight + in_flight  # newcomers have not called as often yet
        self._since_s = max(now_s, self._since_s)
        self._token_s = keep * self._token_s + token_s
        self._served += 1
        self._calls += 1
        self._quiet += 1
        full, bearable = in_flight >= self.limit, self.bearable
        if self._limit < bearable:
            if full:  # as fast as the figures forget: early ones, of short prompts, promise too much
                self._move(self._limit + min(0.25 * self._limit, (1.0 - keep) * (bearable - self._limit)))
        elif self.thrash > self.options.high:
            self._quiet = 0
            if self._calls >= max(4, in_flight):
                # Runs above the limit are still there: shrink from where we are, not from where we wished to be.
                self._move(max(bearable, min(self._limit, in_flight) - 1.0))
        elif self.thrash < self.options.low and full:
            usual = self.options.patience * self._calls_per_run
            if self._quiet >= max(4.0, in_flight * max(1.0, usual)):
                self._move(self._limit + 1.0)

    def _move(self, limit: float) -> None:
        self._limit = max(1.0, min(float(self.options.most), limit))
        self._calls, self._quiet, self._adapted = 0, 0, True

    def ended(self, footprint_tokens: int, calls: int, prompt_tokens: int) -> None:
        """A run has ended that held so many unique tokens and made so many calls, of so many tokens in all. Also for
        runs seen before."""
        self._ended = min(self._ended + 1.0, self.options.memory)
        self._footprint += (footprint_tokens - self._footprint) / self._ended
        self._calls_per_run += (calls - self._calls_per_run) / self._ended
        self._prompt_tokens += (prompt_tokens / max(1, calls) - self._prompt_tokens) / self._ended
        if not self._adapted and self._footprint > 0:
            self._limit = max(1.0, min(self.options.most, 2.0 * self._pool / self._footprint))

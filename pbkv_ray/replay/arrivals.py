"""When runs are submitted, and how long they wait for their tools: the same for every policy."""

import hashlib
import math
import re
from dataclasses import dataclass
from typing import Literal

from pbkv_ray.errors import ConfigError
from pbkv_ray.replay.workload import TraceRun, Workload


@dataclass(frozen=True, slots=True)
class Arrivals:
    """closed:  `concurrency` clients, each submits its next run when its last one has ended.
    backlog: all runs are submitted at the start, `concurrency` of them may be in flight.
    poisson: open loop, `rate` runs a second, as many in flight as come.
    trace:   open loop, at the trace's own start times divided by `rate`.
    """

    kind: Literal["closed", "backlog", "poisson", "trace"] = "closed"
    rate: float = 1.0

    def submit_s(self, workload: Workload, seed: int) -> list[float]:
        """[runs] submission times in the open loop, in the order of the workload's runs."""
        if self.kind == "trace":
            starts = [run.start_s for run in workload.runs]
            if any(start is None for start in starts):
                raise ConfigError(f"{workload.name} has no start times; use closed, backlog or poisson arrivals")
            return [(start or 0.0) / self.rate for start in starts]
        at, times = 0.0, []
        for i in range(len(workload.runs)):
            at += -math.log(1.0 - uniform(seed, "arrival", i)) / self.rate
            times.append(at)
        return times


def parse_arrivals(text: str) -> Arrivals:
    """ "closed", "backlog", "poisson:RATE" or "trace[:SPEED]"."""
    match = re.fullmatch(r"(closed|backlog|poisson|trace)(?::([0-9.]+))?", text)
    if not match or (match[1] == "poisson") > bool(match[2]) or (match[2] and float(match[2]) <= 0):
        raise ConfigError(f"arrivals {text!r} are none of closed, backlog, poisson:RUNS_PER_SECOND, trace:SPEED")
    return Arrivals(match[1], float(match[2] or 1.0))  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class ToolWaits:
    """Seconds between a call's end and the run's next call: the trace's own, else uniform in `low`..`high`, and with
    probability `slow_share` `slow_factor` times as long (people, test suites)."""

    low: float = 1.0
    high: float = 8.0
    slow_share: float = 0.0
    slow_factor: float = 10.0

    def wait_s(self, run: TraceRun, call: int, seed: int) -> float:
        known = run.calls[call].wait_s
        if known is not None:
            return known
        wait = self.low + (self.high - self.low) * uniform(seed, run.run_id, call)
        if self.slow_share and uniform(seed, "slow", run.run_id, call) < self.slow_share:
            wait *= self.slow_factor
        return wait


def uniform(*parts: object) -> float:
    """In [0, 1), a function of its arguments: a draw does not depend on what was drawn before."""
    digest = hashlib.blake2b("\0".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64

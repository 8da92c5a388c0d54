"""What a simulation is given and what it reports: the scheduler's settings, run times, totals."""

from dataclasses import dataclass, field
from typing import Literal

from pbkv_ray.replay.hits import Hits


@dataclass(frozen=True, slots=True)
class Scheduler:
    """concurrency: runs in flight (closed loop, backlog). limit: a bound on top, by an admission rule.
    order: of waiting calls; "cached" takes the one with the largest share of its prompt cached, a waiting second
    counting as `aging` of share."""

    concurrency: int = 16
    limit: int | None = None
    chunk_tokens: int = 2_048
    max_running: int = 64
    order: Literal["fcfs", "cached"] = "fcfs"
    aging: float = 0.05


@dataclass(slots=True)
class RunTimes:
    submitted_s: float
    started_s: float = 0.0
    ended_s: float = 0.0
    prompt_tokens: int = 0


@dataclass(slots=True)
class Outcome:
    """Simulated seconds. `runs` by workload index; `ttft_s` per call; busy time by what the engine did."""

    hits: Hits = field(default_factory=Hits)
    runs: dict[int, RunTimes] = field(default_factory=dict)
    ttft_s: list[float] = field(default_factory=list)
    prefill_s: float = 0.0
    decode_s: float = 0.0
    load_s: float = 0.0
    makespan_s: float = 0.0
    prefetched: dict[str, int] = field(default_factory=dict)  # tokens: useful, late, wasted
    running_s: float = 0.0  # integral of the runs in flight over time

    @property
    def prefill_share(self) -> float:
        busy = self.prefill_s + self.decode_s
        return self.prefill_s / busy if busy else 0.0

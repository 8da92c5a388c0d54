"""What a bench counts of a policy on the real engine, and how two are compared."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from scipy.stats import t as t_distribution


@dataclass(slots=True)
class Tally:
    """One policy's figures over all blocks."""

    prompt: int = 0
    device: int = 0
    host: int = 0
    run_s: list[float] = field(default_factory=list)
    done_s: list[float] = field(default_factory=list)  # from the beginning of the block, when all its runs are there
    ttft_s: list[float] = field(default_factory=list)
    wall_s: float = 0.0
    engine: dict[str, float] = field(default_factory=dict)
    cpu_us: list[float] = field(default_factory=list)  # of the scheduler, a prompt token, one per block
    prefetch: dict[str, int] = field(default_factory=dict)

    def add_engine(self, before: dict[str, Any], after: dict[str, Any], prompt: int) -> None:
        """What the engine counted in a block of `prompt` prompt tokens."""
        self.cpu_us.append(1e6 * (after.get("cpu_s", 0.0) - before.get("cpu_s", 0.0)) / max(1, prompt))
        for key, value in after.items():
            if key == "prefetch":
                for name, tokens in value.items():
                    self.prefetch[name] = self.prefetch.get(name, 0) + tokens
            else:
                # A policy is chosen with fresh counters, the rest counts since the engine started.
                fresh = key in ("partial", "fallbacks", "failures", "guard_fallbacks")
                self.engine[key] = self.engine.get(key, 0) + value - (0 if fresh else before.get(key, 0))

    def as_json(self) -> dict[str, Any]:
        busy = self.engine.get("prefill_s", 0.0) + self.engine.get("decode_s", 0.0)
        computed = self.prompt - self.device - self.host
        return {
            "device_hit": round(self.device / max(1, self.prompt), 4),
            "host_hit": round(self.host / max(1, self.prompt), 4),
            "run_seconds": spread(self.run_s),
            "completion_seconds": spread(self.done_s),
            "ttft_seconds": spread(self.ttft_s),
            "prompt_tokens": self.prompt,
            "recomputed_tokens": computed,
            "prefetch": {f"{name}_tokens": self.prefetch.get(name, 0) for name in ("useful", "late", "wasted")},
            "evicted_tokens": int(self.engine.get("evicted_tokens", 0)),
            "evict_ms_mean": round(1e3 * self.engine.get("evict_s", 0) / max(1, self.engine.get("evictions", 0)), 4),
            "scheduler_cpu_s": round(self.engine.get("cpu_s", 0.0), 2),
            "prefill_share": round(self.engine.get("prefill_s", 0.0) / busy, 3) if busy else None,
            "fallbacks": int(self.engine.get("fallbacks", 0) + self.engine.get("failures", 0)),
            "guard_fallbacks": int(self.engine.get("guard_fallbacks", 0)),
            "wall_seconds": round(self.wall_s, 2),
        }


def spread(values: list[float]) -> dict[str, float]:
    if not values:
        return {"mean": 0.0, "p50": 0.0, "p99": 0.0}
    p50, p99 = np.percentile(values, [50, 99])
    return {"mean": round(float(np.mean(values)), 3), "p50": round(float(p50), 3), "p99": round(float(p99), 3)}


def paired_ratio(ours: Sequence[float], theirs: Sequence[float]) -> dict[str, float] | None:
    """{"mean", "low", "high"}: geometric mean of the blocks' ratios and its 95 % interval (Student's t).

    None for less than three blocks, or where the scheduler reports no CPU time.
    """
    if len(ours) < 3 or min(*ours, *theirs) <= 0:
        return None
    logs = np.log(ours) - np.log(theirs)
    half = float(t_distribution.ppf(0.975, len(logs) - 1)) * float(logs.std(ddof=1)) / len(logs) ** 0.5
    mean = float(logs.mean())
    return {
        name: round(float(np.exp(x)), 4) for name, x in (("mean", mean), ("low", mean - half), ("high", mean + half))
    }

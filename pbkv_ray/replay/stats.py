"""What a trace is like: agents, how predictable they are, how soon they return, what their prompts share."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from math import log2
from typing import Any

import numpy as np

from pbkv_ray.replay.workload import BLOCK_TOKENS, Workload

END = "<END>"


def statistics(workload: Workload) -> dict[str, Any]:
    """Tokens, calls and entropies (bits); JSON-able. A revisit gap is the calls between two of an agent's visits."""
    runs = workload.runs
    lengths = [len(run.calls) for run in runs]
    prompts = [call.prompt_tokens for run in runs for call in run.calls]
    outputs = [call.output_tokens for run in runs for call in run.calls]
    calls = Counter(call.agent for run in runs for call in run.calls)
    transitions = [_transitions(workload, order) for order in range(4)]
    inside, across = _sharing(workload)
    return {
        "runs": len(runs),
        "instances": len({run.instance for run in runs}),
        "calls": sum(lengths),
        "calls_per_run": _quantiles(lengths),
        "prompt_tokens": sum(prompts),
        "prompt_tokens_per_call": _quantiles(prompts),
        "output_tokens_per_call": _quantiles(outputs),
        "agents": {agent: round(n / sum(lengths), 4) for agent, n in calls.most_common()},
        "distinct_paths": len({run.agents for run in runs}),
        "entropy_next_bits": [round(_entropy(table), 3) for table in transitions],
        "runs_that_return": round(sum(_returns(run.agents) for run in runs) / max(1, len(runs)), 4),
        "revisit_gap": _quantiles([gap for run in runs for gap in _gaps(run.agents)]),
        "prefix_shared_inside_run": round(inside, 4),
        "prefix_shared_at_all": round(across, 4),
        "footprint_tokens_per_run": _quantiles([run.footprint_tokens for run in runs]),
        "live_footprint_tokens": round(workload.footprint_tokens * workload.in_flight) if runs else 0,
        "in_flight": workload.in_flight,
    }


def _quantiles(values: list[int]) -> dict[str, float]:
    if not values:
        return {}
    p50, p90, p99 = np.percentile(values, [50, 90, 99])
    return {"mean": round(float(np.mean(values)), 1), "p50": float(p50), "p90": float(p90), "p99": float(p99)}


def _transitions(workload: Workload, order: int) -> Mapping[tuple[str, ...], Counter[str]]:
    table: dict[tuple[str, ...], Counter[str]] = defaultdict(Counter)
    for run in workload.runs:
        path = (*run.agents, END)
        for i in range(1, len(path)):
            table[path[max(0, i - order) : i]][path[i]] += 1
    return table


def _entropy(table: Mapping[tuple[str, ...], Counter[str]]) -> float:
    """Conditional entropy of what comes next."""
    total = sum(sum(row.values()) for row in table.values())
    return (
        -sum(n / total * log2(n / sum(row.values())) for row in table.values() for n in row.values()) if total else 0.0
    )


def _gaps(agents: Iterable[str]) -> list[int]:
    last: dict[str, int] = {}
    gaps = []
    for i, agent in enumerate(agents):
        if agent in last and i - last[agent] > 1:
            gaps.append(i - last[agent] - 1)
        last[agent] = i
    return gaps


def _returns(agents: Iterable[str]) -> bool:
    return bool(_gaps(agents))


def _sharing(workload: Workload) -> tuple[float, float]:
    """Shares of prompt tokens that an endless cache of the run's own, and one of all runs, would hold."""
    seen_at_all: set[int] = set()
    inside = across = total = 0
    for run in workload.runs:
        seen: set[int] = set()
        for call in run.calls:
            blocks = call.blocks().tolist()
            total += call.prompt_tokens
            inside += BLOCK_TOKENS * sum(1 for block in blocks if block in seen)
            across += BLOCK_TOKENS * sum(1 for block in blocks if block in seen_at_all)
            seen.update(blocks)
            seen_at_all.update(blocks)
    return inside / max(1, total), across / max(1, total)

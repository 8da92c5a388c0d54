"""What the KV cache did for a run, call by call: where each call went and why, what it found, why not the rest."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from pbkv_ray.core.calls import CacheReport
from pbkv_ray.store import CallRow

Json = dict[str, Any]
MAX_COSTS = 16  # replicas shown of a decision, cheapest first; the chosen one always


def report_text(report: CacheReport | None) -> str | None:
    """As it is stored with the call."""
    if report is None:
        return None
    told: Json = {"missed": [_short(asdict(span)) for span in report.missed]}
    if (routed := report.routed) is not None:
        costs = [{**asdict(cost), "total_s": cost.total_s} for cost in routed.costs]
        shown = costs[:MAX_COSTS] + [cost for cost in costs[MAX_COSTS:] if cost["replica"] == routed.replica]
        told["routed"] = {"reason": routed.reason, "tokens": routed.tokens, "costs": [_rounded(cost) for cost in shown]}
    return json.dumps(told, separators=(",", ":"))


def kv_json(run_id: str, calls: Sequence[CallRow]) -> Json:
    """`calls` in order of their ends. A call without a report (a stock policy, a foreign router) tells only how much
    it found."""
    shown: list[Json] = []
    elsewhere: dict[tuple[str, str], int] = {}  # (agent, replica) -> longest prompt of an earlier call
    for order, call in enumerate(calls, 1):
        report: Json = json.loads(call.report) if call.report else {}
        missed = report.get("missed")
        shown.append(
            {
                "order": order,
                "call_id": call.call_id,
                "agent": call.agent,
                "step": call.step,
                "attempt": call.attempt,
                "replica": call.replica,
                "routed": report.get("routed"),
                "prompt_tokens": call.prompt_tokens,
                "cached_tokens": {"device": call.device_cached_tokens, "host": call.host_cached_tokens},
                "missed": None if missed is None else [s for span in missed for s in _placed(span, call, elsewhere)],
            }
        )
        key = call.agent, call.replica
        elsewhere[key] = max(elsewhere.get(key, 0), call.prompt_tokens)
    return {"run_id": run_id, "calls": shown}


def _placed(span: Json, call: CallRow, elsewhere: dict[tuple[str, str], int]) -> list[Json]:
    """What an engine takes for never cached may have been computed by the agent's earlier calls, on another replica."""
    if span["cause"] != "never_cached":
        return [span]
    others = {
        replica: n for (agent, replica), n in elsewhere.items() if agent == call.agent and replica != call.replica
    }
    replica, known = max(others.items(), key=lambda one: one[1], default=("", 0))
    cut = min(span["end"], known)
    if cut <= span["start"] or elsewhere.get((call.agent, call.replica), 0) > span["start"]:
        return [span]
    there = {"start": span["start"], "end": cut, "cause": "other_replica", "replica": replica}
    return [there] if cut == span["end"] else [there, {**span, "start": cut}]


def _short(span: Json) -> Json:
    return _rounded({name: value for name, value in span.items() if value is not None and value != ""})


def _rounded(values: Json) -> Json:
    return {name: round(value, 6) if isinstance(value, float) else value for name, value in values.items()}

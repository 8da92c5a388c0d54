"""What the outside tells the scheduler: who makes a request, and what runs will do next. Wire formats, both ends.

Who makes a request travels in its `custom_params`, which SGLang's chat protocol passes on too (its `kv_hints` it does
not): the gateway lets no client set them.
Forecasts and endings travel as one JSON text through SGLang's broadcast (`engine.link`), so that ranks agree.
"""

import json
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from pbkv_ray.config import POLICIES
from pbkv_ray.core.actions import PublishForecast
from pbkv_ray.core.calls import Caller
from pbkv_ray.core.forecast import Forecast

logger = logging.getLogger(__name__)

RPC = "pbkv_apply"  # the method of SGLang's scheduler that takes a payload
RPC_CHOOSE = "pbkv_choose"  # the one that changes the policy, for benchmarks and tests
_DIGITS = 4  # of a probability; the payload is most of a broadcast's cost


@dataclass(frozen=True, slots=True)
class Owner:
    """Who makes a request. An empty run is foreign traffic."""

    run: str
    agent: str
    workflow: str = ""


def owner_params(caller: Caller) -> dict[str, Any]:
    """`custom_params` of a request that `caller` makes (SGLang's sampling parameters)."""
    return {"run": caller.run_id, "agent": caller.agent, "workflow": caller.workflow, "step": caller.step}


def owner_of(req: Any) -> Owner | None:
    """The owner that a scheduler's request names; None when it names none, or not in our format."""
    params = req.sampling_params.custom_params
    if not isinstance(params, dict):
        return None
    run, agent, workflow = params.get("run"), params.get("agent"), params.get("workflow", "")
    if isinstance(run, str) and run and isinstance(agent, str) and isinstance(workflow, str):
        return Owner(run, agent, workflow)
    return None


def encode(forecasts: Iterable[PublishForecast], ended: Mapping[str, float], now_s: float) -> str:
    """One payload: forecasts and endings (run -> when), and the clock that all ranks then use."""
    return json.dumps(
        {
            "now": round(now_s, 3),
            "ended": {run: round(at_s, 3) for run, at_s in ended.items()},
            "forecasts": [
                {
                    "run": hint.run_id,
                    "version": hint.version,
                    "at": round(hint.at_s, 3),
                    "agents": hint.forecast.agents,
                    "step": np.round(hint.forecast.step, _DIGITS).tolist(),
                    "wait": None if (wait := hint.forecast.wait_s) is None else np.round(wait, 3).tolist(),
                }
                for hint in forecasts
            ],
        },
        separators=(",", ":"),
    )


def decode(payload: str) -> tuple[list[PublishForecast], dict[str, float], float]:
    """What `encode` was given. Raises ValueError, KeyError or TypeError for anything else."""
    message = json.loads(payload)
    forecasts = [
        PublishForecast(
            hint["run"],
            int(hint["version"]),
            Forecast(
                tuple(hint["agents"]),
                np.array(hint["step"], np.float64).reshape(-1, len(hint["agents"]) + 1),
                None if hint["wait"] is None else np.array(hint["wait"], np.float64),
            ),
            float(hint["at"]),
        )
        for hint in message["forecasts"]
    ]
    return forecasts, {run: float(at_s) for run, at_s in message["ended"].items()}, float(message["now"])


def order(policy: str) -> str:
    """The payload that puts another policy, or `lru`, in charge."""
    return json.dumps({"policy": policy})


def ordered_policy(payload: str) -> str | None:
    """The policy of an `order`; None for other payloads."""
    if not payload.startswith('{"policy"'):
        return None
    policy = json.loads(payload)["policy"]
    if policy not in POLICIES:
        raise ValueError(f"policy {policy!r} is unknown")
    return str(policy)


class QuietPayloads(logging.Filter):
    """Keeps SGLang's scheduler from logging every payload of ours at INFO."""

    def filter(self, record: logging.LogRecord) -> bool:
        return f"handle_rpc_request: {RPC}" not in str(record.msg)

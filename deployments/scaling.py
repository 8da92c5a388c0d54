"""Ray Serve's autoscaling policy for the engines: `core.scaling` over what the replicas record.

Serve applies its own delays and bounds to what this answers (`upscale_delay_s`, `downscale_delay_s`). It also picks
the replica that goes; that one takes no new calls, finishes those it has, tells the controller, and its runs are
given other homes.
"""

from typing import Any

from pbkv_ray.core.scaling import Load, ScalingOptions, wanted_replicas

POLICY = "deployments.scaling:QueuedTokensPolicy"


class QueuedTokensPolicy:
    """`EngineReplica.record_autoscaling_stats` names the metrics."""

    def __init__(self, queued_tokens: int, max_running: int) -> None:
        self._options = ScalingOptions(queued_tokens, max_running)

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """`context` is Ray Serve's AutoscalingContext."""
        metrics = context.aggregated_metrics or {}
        queued = metrics.get("queued_prefill_tokens") or {}
        running = metrics.get("running_calls") or {}
        loads = [Load(tokens, running.get(replica, 0.0)) for replica, tokens in queued.items()]
        return wanted_replicas(loads, context.target_num_replicas, self._options), {}

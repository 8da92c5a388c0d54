"""The composition root: gateway -> runner -> engines, and the controller that hears all of them.

serve run serve.yaml                     on a cluster
pbkv serve, pbkv demo                    on this machine
"""

import logging
import os
import signal
import threading
from contextlib import redirect_stdout
from io import StringIO
from typing import Any

import ray
from ray import serve
from ray.serve.config import HTTPOptions

from deployments.engine import EngineDeploymentOptions, engine_app
from deployments.hosts import GatewayHost, RunnerHost
from deployments.scaling import POLICY
from deployments.settings import APPLICATION, AppArgs
from pbkv_ray.control.actor import stop_controller
from pbkv_ray.engine.models import resolve_model
from pbkv_ray.errors import UnavailableError
from pbkv_ray.routing.router import router_config
from workflows.tools.sandbox import refusal

logger = logging.getLogger(__name__)

LONGEST_RUN_S = 3_600.0


def build(args: dict[str, Any]) -> Any:
    """The Serve application; `args` are those of AppArgs. Raises ConfigError."""
    return bind(AppArgs.checked(dict(args)))


def bind(args: AppArgs) -> Any:
    engines = engine_app(
        args.engine_options(),
        EngineDeploymentOptions(
            replicas=args.engine_replicas,
            autoscaling=_autoscaling(args),
            graceful_shutdown_timeout_s=args.drain_s,
            health_check_timeout_s=120.0,  # a long prefill on a busy CPU gives no sign of life for a while
            environment=_environment(args),
            controller=args.controller_options,
            router=router_config() if args.router == "pbkv" else None,
        ),
    )
    runner = serve.deployment(
        RunnerHost,
        name="Runner",
        num_replicas=args.runner_replicas,
        max_ongoing_requests=10_000,  # waits and streams are held open here
        graceful_shutdown_timeout_s=30.0,
        ray_actor_options={"num_cpus": 0.1},
    ).bind(args, engines)
    gateway = serve.deployment(
        GatewayHost,
        name="Gateway",
        num_replicas=args.gateway_replicas,
        max_ongoing_requests=10_000,
        graceful_shutdown_timeout_s=10.0,
        ray_actor_options={"num_cpus": 0.1},
    )
    return gateway.bind(args, runner, engines)


def _environment(args: AppArgs) -> dict[str, str]:
    """For engines on a CPU: as many threads as there are cores for each, which sleep while they wait. Spinning
    OpenMP threads that share their cores with anything else were seen to decode thirty times slower."""
    threads = args.engine_threads or max(1, (os.cpu_count() or 1) // args.engine_replicas)
    return {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "0"}


def _autoscaling(args: AppArgs) -> dict[str, Any] | None:
    if args.max_engine_replicas is None:
        return None
    return {
        "min_replicas": args.engine_replicas,
        "max_replicas": args.max_engine_replicas,
        "look_back_period_s": 30.0,
        "upscale_delay_s": args.scale_up_after_s,
        "downscale_delay_s": args.scale_down_after_s,
        "policy": {
            "policy_function": POLICY,
            "policy_kwargs": {"queued_tokens": args.scale_at_queued_tokens, "max_running": args.max_running_requests},
        },
    }


def start_ray(least_cpus: int, attempts: int = 3) -> None:
    """The cluster that RAY_ADDRESS names, or one on this machine's loopback with at least so many logical CPUs.

    Ray gives a node 30 s to start, which a busy machine may need more than once. Raises UnavailableError.
    """
    for attempt in range(1, attempts + 1):
        try:
            if "RAY_ADDRESS" in os.environ:
                ray.init(log_to_driver=False, logging_level="ERROR")
            else:
                ray.init(
                    address="local",
                    num_cpus=max(os.cpu_count() or 1, least_cpus),
                    include_dashboard=False,
                    log_to_driver=False,
                    logging_level="ERROR",
                    _node_ip_address="127.0.0.1",
                )
            return
        except Exception as error:  # Ray raises plain ones here
            ray.shutdown()
            if attempt == attempts:
                raise UnavailableError(f"Ray did not start: {error}") from error


def run_local(args: AppArgs, host: str, port: int, *, name: str = APPLICATION) -> None:
    """Ray on this machine, if there is none in this process, and the application on it; returns when it serves.

    Raises UnavailableError when a part does not start.
    """
    if (said := refusal()) is not None:
        logger.warning("workflows that test code will fail: %s", said)
    resolve_model(args.model)  # what is wrong with the model is better said here than in a replica's log
    if not ray.is_initialized():
        start_ray(args.engine_replicas + 1)
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: Ray's own handler is a crash report
    http = HTTPOptions(host=host, port=port, request_timeout_s=LONGEST_RUN_S)
    serve.start(proxy_location="HeadOnly", http_options=http)
    try:
        serve.run(bind(args), name=name, route_prefix="/")
    except RuntimeError as error:
        logs = "/tmp/ray/session_latest/logs/serve"
        raise UnavailableError(f"the application did not start: {error}; its logs are in {logs}") from error


def stop_application(name: str = APPLICATION) -> None:
    """Ends the application and its controller; Ray and other applications go on."""
    serve.delete(name)
    stop_controller(name)


def stop_local() -> None:
    """Ends the application, its controller and Ray, as far as they have started."""
    if not ray.is_initialized():  # Serve would start it
        return
    with redirect_stdout(StringIO()):  # Ray prints there that Serve's controller, which ends itself, has died
        serve.shutdown()
        stop_controller(APPLICATION)
        ray.shutdown()

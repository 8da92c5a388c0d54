"""EngineOptions -> the keyword arguments of `sglang.Engine`. Needs no SGLang."""

from pathlib import Path
from typing import Any

from pbkv_ray.config import EngineOptions
from pbkv_ray.engine.cpu_platform import cpu_arguments, default_dtype
from pbkv_ray.engine.models import DEFAULT
from pbkv_ray.engine.policies import policy_arguments
from pbkv_ray.errors import ConfigError


def served_name(model: str) -> str:
    """How clients name the model: never a path of this machine."""
    if model == DEFAULT:
        return "SmolLM2-135M-Instruct"
    path = Path(model).expanduser()
    return path.name if path.is_dir() else model


def engine_arguments(options: EngineOptions, model_path: str, accelerator: bool, **switches: Any) -> dict[str, Any]:
    """Arguments for `sglang.Engine`; `options.extra` has the last word. `switches` are those of `policies`.

    On a machine with an accelerator SGLang keeps its own choice of kernels, and of pool sizes that are zero.
    Raises ConfigError when a CPU engine is left without a pool size.
    """
    if not accelerator and options.device_pool_tokens <= 0:
        raise ConfigError(
            f"device_pool_tokens is {options.device_pool_tokens}; a CPU engine needs the size of its pool in tokens"
        )
    arguments: dict[str, Any] = {
        "model_path": model_path,
        "served_model_name": served_name(options.model),
        "dtype": options.dtype,
        "random_seed": options.random_seed,
        "context_length": options.context_length,
        "page_size": options.page_size,
        "tp_size": options.tensor_parallel,
        "max_running_requests": options.max_running_requests,
        "chunked_prefill_size": options.chunked_prefill_tokens,
        "grammar_backend": "xgrammar",
        "constrained_json_disable_any_whitespace": True,  # else a small model fills an object with newlines
        "enable_cache_report": True,
        "enable_metrics": True,
        "log_level": "error",
    }
    if options.device_pool_tokens > 0:
        arguments["max_total_tokens"] = options.device_pool_tokens
    if options.host_pool_ratio > 0:
        arguments |= {
            "enable_hierarchical_cache": True,
            "hicache_ratio": options.host_pool_ratio,
            "hicache_write_policy": options.write_policy,
        }
    if not accelerator:
        arguments |= cpu_arguments()
        if options.dtype == "auto":
            arguments["dtype"] = default_dtype(Path("/proc/cpuinfo").read_text())
    return arguments | policy_arguments(options.policy, **{"shadow": options.shadow, **switches}) | options.extra

"""SGLang on a machine without an accelerator, through its own out-of-tree platform seam (`sglang.srt.platforms`).

Unmodified SGLang 0.5.23 runs on PyTorch's CPU operators, HiCache's host tier included, once a platform says
that it may and supplies the two things that only its CUDA wheel would bring: an allocator for the host pool and
the copy between the pools. On a machine with an accelerator the plug-in steps aside.
"""

import os
from collections.abc import MutableMapping, Sequence
from typing import Any

from pbkv_ray.engine import orphans

PLATFORM = "pbkv_cpu"  # our entry point in sglang.srt.platforms
PLUGIN = "pbkv"  # our entry point in sglang.srt.plugins
ATTENTION_BACKEND = "pbkv_cpu_rows"


def has_accelerator() -> bool:
    """True when PyTorch sees a device that SGLang serves from (CUDA, ROCm, XPU, ...) in this process.

    Inside a Ray actor without GPUs none is visible (CUDA_VISIBLE_DEVICES is empty), so the CPU is used there.
    """
    import torch

    return bool(torch.accelerator.is_available())


def activate() -> str | None:
    """The entry point: the class path of our platform, or None where it must not be used."""
    orphans.register()  # SGLang calls this while it imports itself, long before it loads plug-ins
    if has_accelerator() or os.environ.get("SGLANG_USE_CPU_ENGINE") == "1":
        return None
    return "pbkv_ray.engine.cpu_platform_class.PbkvCpuPlatform"


def select_platform(environ: MutableMapping[str, str], accelerator: bool) -> None:
    """Set what SGLang reads at import so that its processes load our plug-ins, and on a CPU our platform.

    Call before the first `import sglang`. A SGLANG_PLATFORM or SGLANG_USE_CPU_ENGINE that the user has set wins;
    a SGLANG_PLUGINS list of theirs keeps its entries and gains ours. SGLANG_PLATFORM is never set on a machine
    with an accelerator: SGLang fails when the platform it names declines.
    """
    on_cpu = not accelerator and environ.get("SGLANG_USE_CPU_ENGINE") != "1"
    if on_cpu:
        environ.setdefault("SGLANG_PLATFORM", PLATFORM)
    if allowed := environ.get("SGLANG_PLUGINS", "").strip():
        names = [name.strip() for name in allowed.split(",") if name.strip()]
        environ["SGLANG_PLUGINS"] = ",".join(dict.fromkeys([*names, PLUGIN, *([PLATFORM] if on_cpu else [])]))


def cpu_arguments() -> dict[str, Any]:
    """The arguments of `sglang.Engine` that a CPU needs; none of them is passed on a GPU machine."""
    return {
        "device": "cpu",
        "attention_backend": ATTENTION_BACKEND,
        "sampling_backend": "pytorch",
        "disable_overlap_schedule": True,  # overlaps the scheduler with a GPU stream; a CPU has none
        "disable_cuda_graph": True,
        "sleep_on_idle": True,  # else an idle scheduler keeps a core busy that the other processes need
        "mem_fraction_static": 0.3,
        "hicache_io_backend": "direct",
        "hicache_mem_layout": "layer_first",
    }


def default_dtype(cpuinfo: str) -> str:
    """The number format for a CPU with the `flags` of /proc/cpuinfo. Without bfloat16 instructions PyTorch's bfloat16
    products are slow: seven times as slow as float32 in prefill on an AVX2 machine."""
    return "auto" if {"avx512_bf16", "amx_bf16"} & set(cpuinfo.split()) else "float32"


def copy_between_pools(
    src_layers: Sequence[Any], dst_layers: Sequence[Any], src_indices: Any, dst_indices: Any, page_size: int
) -> None:
    """HiCache's transfer operator on the CPU: rows `src_indices` of each layer to rows `dst_indices`.

    Layers are tensors [tokens, heads, head dim]; indices are one per token, whatever the page size.
    """
    for src, dst in zip(src_layers, dst_layers, strict=True):
        dst.index_copy_(0, dst_indices, src.index_select(0, src_indices))


def allocate_host_pool(
    dims: Sequence[int],
    dtype: Any,
    device: Any,
    pin_memory: bool,
    allocator: Any,
    registration_granularity_bytes: int | None = None,
) -> Any:
    """HiCache's host pool on the CPU: plain memory, as there is no device to pin or register it for."""
    import torch

    return torch.empty(tuple(dims), dtype=dtype, device=device)

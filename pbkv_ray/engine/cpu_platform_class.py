"""The platform class that `cpu_platform.activate` names. Imports SGLang, so nothing of ours imports it."""

from typing import Any

from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import PlatformCapabilities, SRTPlatform

from pbkv_ray.engine.cpu_platform import ATTENTION_BACKEND, allocate_host_pool, copy_between_pools

HOST_RESERVE_BYTES = 1 << 30


class PbkvCpuPlatform(CpuDeviceMixin, SRTPlatform):
    """An out-of-tree CPU: `native` forwards (PyTorch) instead of the kernels of SGLang's own CPU engine."""

    _enum = PlatformEnum.OOT
    device_name = "cpu"
    device_type = "cpu"
    capabilities = PlatformCapabilities()

    def get_default_attention_backend(self) -> str:
        return ATTENTION_BACKEND

    def get_dispatch_key_name(self) -> str:
        return "native"

    def is_pin_memory_available(self, device: Any = None) -> bool:
        return False

    def init_backend(self) -> None:
        from sglang.srt.mem_cache.pool_host import base, common, mha, mla

        common.ALLOC_MEMORY_FUNCS["cpu"] = allocate_host_pool
        mha.transfer_kv_direct = copy_between_pools
        mla.transfer_kv_direct = copy_between_pools
        # SGLang leaves 10 GB of the host alone, a GPU server's measure that no laptop passes.
        base.HICACHE_HOST_MEMORY_RESERVE_BYTES = HOST_RESERVE_BYTES

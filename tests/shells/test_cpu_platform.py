"""How SGLang comes to run on the CPU, and how the plug-in steps aside."""

import os
import subprocess
import sys
from importlib.metadata import entry_points

import pytest
import torch

from pbkv_ray.config import EngineOptions
from pbkv_ray.engine import cpu_platform
from pbkv_ray.engine.arguments import engine_arguments
from pbkv_ray.engine.cpu_platform import PLATFORM, PLUGIN, activate, copy_between_pools, select_platform
from pbkv_ray.errors import ConfigError


def test_the_entry_points_are_installed_under_the_names_that_the_server_sets() -> None:
    platforms = {point.name: point.value for point in entry_points(group="sglang.srt.platforms")}
    plugins = {point.name: point.value for point in entry_points(group="sglang.srt.plugins")}
    assert platforms[PLATFORM] == "pbkv_ray.engine.cpu_platform:activate"
    assert plugins[PLUGIN] == "pbkv_ray.engine.plugin:register"


@pytest.mark.parametrize(
    ("accelerator", "own_cpu_engine", "class_path"),
    [
        (False, None, "pbkv_ray.engine.cpu_platform_class.PbkvCpuPlatform"),
        (True, None, None),
        (False, "1", None),
    ],
    ids=["a machine without a GPU", "a machine with one", "the user wants SGLang's own CPU engine"],
)
def test_the_platform_is_ours_only_where_nothing_better_is(
    monkeypatch: pytest.MonkeyPatch, accelerator: bool, own_cpu_engine: str | None, class_path: str | None
) -> None:
    monkeypatch.setattr(cpu_platform, "has_accelerator", lambda: accelerator)
    monkeypatch.delenv("SGLANG_USE_CPU_ENGINE", raising=False)
    if own_cpu_engine:
        monkeypatch.setenv("SGLANG_USE_CPU_ENGINE", own_cpu_engine)
    assert activate() == class_path


@pytest.mark.parametrize(
    ("before", "accelerator", "after"),
    [
        ({}, False, {"SGLANG_PLATFORM": "pbkv_cpu"}),
        ({}, True, {}),
        ({"SGLANG_PLATFORM": "theirs"}, False, {"SGLANG_PLATFORM": "theirs"}),
        ({"SGLANG_USE_CPU_ENGINE": "1"}, False, {"SGLANG_USE_CPU_ENGINE": "1"}),
        (
            {"SGLANG_PLUGINS": "a, b"},
            False,
            {"SGLANG_PLATFORM": "pbkv_cpu", "SGLANG_PLUGINS": "a,b,pbkv,pbkv_cpu"},
        ),
        ({"SGLANG_PLUGINS": "pbkv"}, True, {"SGLANG_PLUGINS": "pbkv"}),
    ],
)
def test_the_user_sets_nothing_and_what_he_sets_wins(
    before: dict[str, str], accelerator: bool, after: dict[str, str]
) -> None:
    select_platform(before, accelerator)
    assert before == after


def test_sglang_takes_our_platform_and_our_attention() -> None:
    """In a process of its own, as SGLang decides at import. It has no GPU, whatever the machine has."""
    program = (
        "import os; from pbkv_ray.engine.cpu_platform import *; select_platform(os.environ, has_accelerator())\n"
        "from sglang.srt.platforms import current_platform as p; from sglang.srt.plugins import load_plugins\n"
        "load_plugins(); from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS as found\n"
        "print(type(p).__name__, p.device_type, p.is_out_of_tree(), p.get_default_attention_backend() in found)"
    )
    environment = {k: v for k, v in os.environ.items() if not k.startswith("SGLANG_")} | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, check=False)
    assert done.stdout.split() == ["PbkvCpuPlatform", "cpu", "True", "True"], done.stderr[-2_000:]


def test_the_pools_exchange_rows_by_index() -> None:
    device = [torch.arange(12.0).view(6, 1, 2), torch.arange(12.0).view(6, 1, 2) + 100]
    host = [torch.zeros(4, 1, 2), torch.zeros(4, 1, 2)]
    copy_between_pools(device, host, torch.tensor([5, 0]), torch.tensor([2, 1]), page_size=1)
    assert host[0].flatten().tolist() == [0, 0, 0, 1, 10, 11, 0, 0]
    assert host[1].flatten().tolist() == [0, 0, 100, 101, 110, 111, 0, 0]


def test_a_gpu_machine_keeps_sglangs_own_choices() -> None:
    options = EngineOptions(model="default", device_pool_tokens=0, tensor_parallel=2)
    arguments = engine_arguments(options, "/models/m", accelerator=True)
    forced = {"device", "attention_backend", "sampling_backend", "mem_fraction_static", "max_total_tokens"}
    assert forced.isdisjoint(arguments)
    assert arguments["tp_size"] == 2


def test_a_cpu_engine_needs_to_be_told_its_pool() -> None:
    options = EngineOptions(model="default", device_pool_tokens=0)
    with pytest.raises(ConfigError, match="device_pool_tokens is 0"):
        engine_arguments(options, "/models/m", accelerator=False)


def test_extra_arguments_have_the_last_word() -> None:
    options = EngineOptions(model="default", extra={"attention_backend": "torch_native"})
    assert engine_arguments(options, "/models/m", accelerator=False)["attention_backend"] == "torch_native"


def test_bfloat16_is_used_only_where_the_cpu_has_instructions_for_it():
    from pbkv_ray.engine.cpu_platform import default_dtype

    assert default_dtype("flags : fpu avx2 fma") == "float32"
    assert default_dtype("flags : avx512f avx512_bf16 fma") == "auto"
    assert default_dtype("flags : amx_bf16") == "auto"

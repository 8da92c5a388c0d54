"""Renew the pinned sets: `make lock`.

full.txt is the whole resolution of pyproject.toml, for machines with an NVIDIA GPU. cpu.txt is the same without
what only CUDA kernels, other model kinds or model hubs need; it is installed with --no-deps. Every package left
out was checked by running the engine without it: SGLang imports them lazily.
"""

import re
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]

CUDA_KERNELS = {
    "cuda-tile", "flash-attn-4", "flashinfer-python", "humming-kernels", "nvidia-cutlass-dsl",
    "nvidia-cutlass-dsl-libs-base", "nvidia-cutlass-dsl-libs-core", "nvidia-cutlass-dsl-libs-cu12",
    "nvidia-cutlass-dsl-libs-cu13", "nvidia-mathdx", "nvshmem4py-cu13", "quack-kernels", "sgl-deep-ep",
    "sgl-deep-gemm", "sgl-flash-mla", "sglang-kernel", "tilelang", "z3-solver",
}  # fmt: skip
OTHER_MODELS_AND_HUBS = {
    "blobfile", "deepseek-recipe", "modelscope", "modelscope-hub", "smg-grpc-proto", "smg-grpc-servicer",
    "soundfile", "timm", "tml-renderers", "torchaudio", "torchcodec",
}  # fmt: skip
LEFT_OUT = CUDA_KERNELS | OTHER_MODELS_AND_HUBS


def slim(full: list[str]) -> list[str]:
    """The lines of `full` whose package is not left out. Raises SystemExit when a left-out name is gone."""
    names = {re.split(r"[=\[; ]", line, maxsplit=1)[0] for line in full}
    if missing := LEFT_OUT - names:
        sys.exit(f"left out but not in the resolution any more: {', '.join(sorted(missing))}; edit {__file__}")
    return [line for line in full if re.split(r"[=\[; ]", line, maxsplit=1)[0] not in LEFT_OUT]


def main() -> None:
    target = HERE / "full.txt"
    command = [
        "uv",
        "pip",
        "compile",
        "pyproject.toml",
        "--extra",
        "dev",
        "--universal",
        "--python-version",
        "3.11",
    ]
    quiet = ["--no-header", "--no-annotate", "--no-emit-index-url", "--quiet", "--upgrade"]
    subprocess.run([*command, *quiet, "-o", str(target)], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    lines = target.read_text().splitlines()
    kept = slim(lines)
    (HERE / "cpu.txt").write_text("\n".join(kept) + "\n")
    print(f"full.txt: {len(lines)} packages, cpu.txt: {len(kept)}")


if __name__ == "__main__":
    main()

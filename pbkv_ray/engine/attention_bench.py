"""How much faster `pbkv_cpu_rows` is than SGLang's torch_native: `python -m pbkv_ray.engine.attention_bench`.

One attention layer with SmolLM2's heads on random caches; the two backends take turns, so that the ratio holds on a
busy machine. A ratio above one means that ours is faster; it is the median of the ratios of neighbouring turns.
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from pbkv_ray.engine.cpu_platform import has_accelerator, select_platform

HEADS, KEY_HEADS, DIM, POOL = 9, 3, 64, 40_000
# (cached tokens, new tokens) of one prompt
EXTENDS = ((3_999, 1), (3_840, 160), (3_000, 1_000), (2_000, 2_000), (0, 2_000), (0, 500))
# (requests, tokens each) of a decode batch
DECODES = ((1, 500), (1, 4_000), (8, 100), (8, 500), (8, 2_000), (16, 500))


def measure(turns: int, dtype: torch.dtype) -> list[dict[str, Any]]:
    """One row a shape: {"what", "cached" and "new" or "requests" and "tokens", "seconds": {...}, "ratio"}."""
    select_platform(os.environ, has_accelerator())
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    from pbkv_ray.engine.attention_backend import CpuRowsBackend

    runner = SimpleNamespace(device="cpu", req_to_token_pool=None, token_to_kv_pool=None)
    backends = {"torch_native": TorchNativeAttnBackend(runner), "pbkv_cpu_rows": CpuRowsBackend(runner)}
    random = torch.Generator().manual_seed(0)
    k_cache, v_cache = (torch.randn(POOL, KEY_HEADS, DIM, generator=random).to(dtype) for _ in range(2))

    def batch(lengths: list[int]) -> dict[str, Any]:
        slots = torch.stack([torch.randperm(POOL, generator=random)[: max(lengths)] for _ in lengths])
        return {
            "k_cache": k_cache,
            "v_cache": v_cache,
            "req_to_token": slots,
            "req_pool_indices": torch.arange(len(lengths)),
            "seq_lens": torch.tensor(lengths),
            "scaling": DIM**-0.5,
            "enable_gqa": True,
        }

    rows: list[dict[str, Any]] = []
    for cached, new in EXTENDS:
        given = batch([cached + new]) | {
            "query": torch.randn(new, HEADS, DIM, generator=random).to(dtype),
            "extend_prefix_lens": torch.tensor([cached]),
            "extend_seq_lens": torch.tensor([new]),
            "causal": True,
        }
        rows.append({"what": "extend", "cached": cached, "new": new} | _race(backends, "extend", given, turns))
    for requests, tokens in DECODES:
        given = batch([tokens] * requests) | {"query": torch.randn(requests, HEADS, DIM, generator=random).to(dtype)}
        rows.append(
            {"what": "decode", "requests": requests, "tokens": tokens} | _race(backends, "decode", given, turns)
        )
    return rows


def _race(backends: dict[str, Any], what: str, given: dict[str, Any], turns: int) -> dict[str, Any]:
    output = torch.empty_like(given["query"])

    def turn(backend: Any) -> Callable[[], None]:
        def run() -> None:
            backend._groups = None
            getattr(backend, f"_run_sdpa_forward_{what}")(output=output, **given)

        return run

    seconds: dict[str, list[float]] = {name: [] for name in backends}
    for number in range(turns + 1):  # the first turn warms up
        for name, backend in backends.items():
            started = time.perf_counter()
            turn(backend)()
            if number:
                seconds[name].append(time.perf_counter() - started)
    ratios = [theirs / ours for theirs, ours in zip(*seconds.values(), strict=True)]
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    return {"seconds": medians, "ratio": statistics.median(ratios), "ratio_range": [min(ratios), max(ratios)]}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m pbkv_ray.engine.attention_bench")
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    options = parser.parse_args(arguments)
    rows = measure(max(1, options.turns), getattr(torch, options.dtype))
    print(
        f"one layer, {HEADS} heads, {KEY_HEADS} key heads x {DIM}, {options.dtype}, {torch.get_num_threads()} threads"
    )
    for row in rows:
        shape = (
            f"{row['new']} new after {row['cached']} cached"
            if row["what"] == "extend"
            else f"{row['requests']} requests of {row['tokens']}"
        )
        low, high = row["ratio_range"]
        ours, theirs = row["seconds"]["pbkv_cpu_rows"] * 1e3, row["seconds"]["torch_native"] * 1e3
        print(
            f"{row['what']:7} {shape:28} {theirs:9.2f} ms -> {ours:8.2f} ms  x{row['ratio']:.1f} ({low:.1f}-{high:.1f})"
        )
    if options.json is not None:
        told = {"dtype": options.dtype, "threads": torch.get_num_threads(), "turns": options.turns, "rows": rows}
        options.json.write_text(json.dumps(told, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""`pbkv_cpu_rows`: SGLang's attention on the CPU, computing only the new rows of a prompt.

SGLang's torch_native backend pads the query to the whole sequence, so a cached prefix costs its attention again,
and it decodes a batch request by request with a slow gather. Here
  * new rows are cut into chunks that each see their own past only (one mask over all columns would cost as much as
    a full recompute once half of the prompt is new);
  * the query heads that share a key head become rows of one product, so that keys and values are not repeated;
  * the cache is gathered as flat rows, several times faster than indexing its three dimensions;
  * short requests of a decode batch share one padded call; long ones do not, their columns would leave the cache.
The results are torch_native's up to the order of floating-point sums.

Plain functions on tensors; `register` hands them to SGLang. H heads, H_kv key heads (H a multiple), D head dimension.
Causal self-attention without sliding windows only: anything else stays with torch_native.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

ROWS = 256  # new rows a chunk: large enough for the matrix product, small enough to skip most masked columns
COLUMNS = 1_024  # padded columns of a decode group: beyond, a call for each request was faster (attention_bench)
WASTE = 2.0  # padded columns over needed ones


def gather(cache: torch.Tensor, slots: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Rows `slots` (any shape) of a cache [pool, H_kv, D] as [*slots.shape, H_kv, D]."""
    rows = cache.flatten(1).index_select(0, slots.flatten())
    return rows.view(*slots.shape, *cache.shape[1:]).to(dtype)


def extend_rows(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None, rows: int = ROWS
) -> torch.Tensor:
    """Attention of the last `new` positions of one sequence over all of its positions.

    query [new, H, D], key [total, H_kv, D], value [total, H_kv, D_v], total >= new; returns [new, H, D_v].
    """
    (new, heads, dim), (total, key_heads, _) = query.shape, key.shape
    share = heads // key_heads
    k, v = key.transpose(0, 1).unsqueeze(0), value.transpose(0, 1).unsqueeze(0)
    if new == total > 1:  # no past: the kernel's own causal mode skips what a mask would compute
        whole = query.transpose(0, 1).unsqueeze(0)
        part = scaled_dot_product_attention(whole, k, v, is_causal=True, scale=scale, enable_gqa=share > 1)
        return part.squeeze(0).transpose(0, 1)
    output = query.new_empty(new, heads, value.shape[-1])
    for start in range(0, new, rows):
        count = min(rows, new - start)
        seen = total - new + start + count  # columns that the last row of the chunk sees
        q = query[start : start + count].view(count, key_heads, share, dim).permute(1, 2, 0, 3)
        mask = None
        if count > 1:
            mask = torch.ones(count, seen, dtype=torch.bool, device=query.device).tril(seen - count).repeat(share, 1)
        part = scaled_dot_product_attention(
            q.reshape(1, key_heads, share * count, dim), k[:, :, :seen], v[:, :, :seen], attn_mask=mask, scale=scale
        )
        part = part.view(key_heads, share, count, -1).permute(2, 0, 1, 3)
        output[start : start + count] = part.reshape(count, heads, -1)
    return output


def decode_groups(lengths: Sequence[int], columns: int = COLUMNS, waste: float = WASTE) -> list[list[int]]:
    """The indices of `lengths` in groups to be padded together, each index once, longest first.

    A group of several has at most `columns` padded columns (its longest times its size), and at most `waste` times
    the columns that its members need.
    """
    groups: list[list[int]] = []
    needed = 0
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        if groups:
            padded = lengths[groups[-1][0]] * (len(groups[-1]) + 1)
            if padded <= columns and padded <= waste * (needed + lengths[index]):
                groups[-1].append(index)
                needed += lengths[index]
                continue
        groups.append([index])
        needed = lengths[index]
    return groups


def decode_group(
    query: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
    seen: torch.Tensor | None,
    scale: float | None,
) -> torch.Tensor:
    """One new position for each of G requests over its own past, in one call.

    query [G, H, D]; caches [pool, H_kv, D]; slots [G, longest] are rows of the caches, those that count are True in
    seen [G, longest] (None: all count). Returns [G, H, D_v].
    """
    size, heads, dim = query.shape
    key_heads = k_cache.shape[1]
    k = gather(k_cache, slots, query.dtype).transpose(1, 2)  # [G, H_kv, longest, D]
    v = gather(v_cache, slots, query.dtype).transpose(1, 2)
    mask = None if seen is None else seen[:, None, None, :]
    q = query.view(size, key_heads, heads // key_heads, dim)
    return scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale).reshape(size, heads, -1)


def padded_slots(slots: torch.Tensor, lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The slots and `seen` for `decode_group` of rows [G, longest] valid up to lengths [G].

    What lies beyond a request's length may be any number: it is replaced by the request's first slot, which holds
    finite values (a weight of zero does not cancel a NaN).
    """
    if slots.shape[0] == 1:
        return slots, None
    seen = torch.arange(slots.shape[1], device=slots.device) < lengths[:, None]
    return torch.where(seen, slots, slots[:, :1]), seen


def register() -> None:
    """Add the backend to SGLang's registry; runs in every SGLang process."""
    from sglang.srt.layers.attention.attention_registry import register_attention_backend

    from pbkv_ray.engine.cpu_platform import ATTENTION_BACKEND

    @register_attention_backend(ATTENTION_BACKEND)
    def build(runner: Any) -> Any:
        from pbkv_ray.engine.attention_backend import CpuRowsBackend

        return CpuRowsBackend(runner)

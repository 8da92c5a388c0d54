"""The SGLang class around `engine.attention`. Imports SGLang; `attention.register` names it."""

from typing import Any

import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

from pbkv_ray.engine.attention import decode_group, decode_groups, extend_rows, gather, padded_slots

# One group of a decode batch: its requests' positions in the batch, and what `decode_group` reads.
Group = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]


class CpuRowsBackend(TorchNativeAttnBackend):
    """torch_native with its two loops replaced; cross-attention and sliding windows stay as they are."""

    def __init__(self, model_runner: Any) -> None:
        super().__init__(model_runner)
        self._groups: list[Group] | None = None

    def init_forward_metadata(self, forward_batch: Any) -> None:
        super().init_forward_metadata(forward_batch)
        self._groups = None  # planned by the first layer of a decode, kept for the others

    def _run_sdpa_forward_extend(
        self,
        query: torch.Tensor,
        output: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        req_to_token: torch.Tensor,
        req_pool_indices: torch.Tensor,
        seq_lens: torch.Tensor,
        extend_prefix_lens: torch.Tensor,
        extend_seq_lens: torch.Tensor,
        encoder_lens: torch.Tensor | None = None,
        scaling: float | None = None,
        enable_gqa: bool = False,
        causal: bool = False,
        is_cross_attn: bool = False,
        sliding_window_size: int | None = None,
    ) -> Any:
        if not causal or is_cross_attn or encoder_lens is not None or sliding_window_size is not None:
            return super()._run_sdpa_forward_extend(
                query,
                output,
                k_cache,
                v_cache,
                req_to_token,
                req_pool_indices,
                seq_lens,
                extend_prefix_lens,
                extend_seq_lens,
                encoder_lens,
                scaling,
                enable_gqa,
                causal,
                is_cross_attn,
                sliding_window_size,
            )
        start = 0
        pools, totals, news = req_pool_indices.tolist(), seq_lens.tolist(), extend_seq_lens.tolist()
        for pool, total, new in zip(pools, totals, news, strict=True):
            slots = req_to_token[pool, :total]
            key, value = gather(k_cache, slots, query.dtype), gather(v_cache, slots, query.dtype)
            output[start : start + new] = extend_rows(query[start : start + new], key, value, scaling)
            start += new
        return output

    def _run_sdpa_forward_decode(
        self,
        query: torch.Tensor,
        output: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        req_to_token: torch.Tensor,
        req_pool_indices: torch.Tensor,
        seq_lens: torch.Tensor,
        encoder_lens: torch.Tensor | None = None,
        scaling: float | None = None,
        enable_gqa: bool = False,
        causal: bool = False,
        is_cross_attn: bool = False,
        sliding_window_size: int | None = None,
    ) -> Any:
        if is_cross_attn or encoder_lens is not None or sliding_window_size is not None:
            return super()._run_sdpa_forward_decode(
                query,
                output,
                k_cache,
                v_cache,
                req_to_token,
                req_pool_indices,
                seq_lens,
                encoder_lens,
                scaling,
                enable_gqa,
                causal,
                is_cross_attn,
                sliding_window_size,
            )
        if self._groups is None:
            self._groups = plan_decode(req_to_token, req_pool_indices, seq_lens)
        for chosen, slots, seen in self._groups:
            output[chosen] = decode_group(query[chosen], k_cache, v_cache, slots, seen, scaling)
        return output


def plan_decode(req_to_token: torch.Tensor, req_pool_indices: torch.Tensor, seq_lens: torch.Tensor) -> list[Group]:
    """The groups of a decode batch; req_to_token [requests, context] holds the slots of each request."""
    lengths = seq_lens.tolist()
    plan: list[Group] = []
    for group in decode_groups(lengths):
        chosen = torch.tensor(group, device=seq_lens.device)
        slots = req_to_token[req_pool_indices[chosen], : lengths[group[0]]]
        plan.append((chosen, *padded_slots(slots, seq_lens[chosen])))
    return plan

"""Our CPU attention against SGLang's torch_native, on random prefixes and on the real engine."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pbkv_ray.engine.attention import decode_groups

DIM, POOL, CONTEXT = 16, 4_096, 700


@pytest.fixture(scope="module")
def backends() -> Iterator[tuple[Any, Any]]:
    """torch_native and ours, over the same nothing: the functions under test take their caches as arguments."""
    import os

    from pbkv_ray.engine.cpu_platform import has_accelerator, select_platform

    select_platform(os.environ, has_accelerator())
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    from pbkv_ray.engine.attention_backend import CpuRowsBackend

    runner = SimpleNamespace(device="cpu", req_to_token_pool=None, token_to_kv_pool=None)
    yield TorchNativeAttnBackend(runner), CpuRowsBackend(runner)


def caches(seed: int, key_heads: int, lengths: list[int]) -> dict[str, Any]:
    """Random caches, and requests of these lengths whose slots lie anywhere in the pool, none shared."""
    random = torch.Generator().manual_seed(seed)
    table = torch.randint(0, POOL, (len(lengths) + 2, CONTEXT), generator=random)  # beyond a length: anything
    order = torch.randperm(POOL, generator=random)
    rows = torch.randperm(len(lengths) + 2, generator=random)[: len(lengths)]
    start = 0
    for row, length in zip(rows.tolist(), lengths, strict=True):
        table[row, :length] = order[start : start + length]
        start += length
    return {
        "k_cache": torch.randn(POOL, key_heads, DIM, generator=random),
        "v_cache": torch.randn(POOL, key_heads, DIM, generator=random),
        "req_to_token": table,
        "req_pool_indices": rows,
        "seq_lens": torch.tensor(lengths),
    }


heads = st.sampled_from([(4, 4), (4, 2), (9, 3), (8, 1)])


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**20),
    heads=heads,
    parts=st.lists(st.tuples(st.integers(0, 350), st.integers(1, 340)), min_size=1, max_size=4),
)
def test_new_rows_get_what_torch_native_gives_them(
    backends: tuple[Any, Any], seed: int, heads: tuple[int, int], parts: list[tuple[int, int]]
) -> None:
    theirs, ours = backends
    given_ = caches(seed, heads[1], [cached + new for cached, new in parts])
    news = torch.tensor([new for _, new in parts])
    query = torch.randn(int(news.sum()), heads[0], DIM, generator=torch.Generator().manual_seed(seed + 1))
    outputs = [
        backend._run_sdpa_forward_extend(
            query,
            torch.full_like(query, torch.nan),
            **given_,
            extend_prefix_lens=torch.tensor([cached for cached, _ in parts]),
            extend_seq_lens=news,
            scaling=DIM**-0.5,
            enable_gqa=heads[0] != heads[1],
            causal=True,
        )
        for backend in (theirs, ours)
    ]
    torch.testing.assert_close(outputs[1], outputs[0], atol=2e-5, rtol=1e-4)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**20), heads=heads, lengths=st.lists(st.integers(1, 600), min_size=1, max_size=6))
def test_a_decode_batch_gets_what_torch_native_gives_it(
    backends: tuple[Any, Any], seed: int, heads: tuple[int, int], lengths: list[int]
) -> None:
    theirs, ours = backends
    given_ = caches(seed, heads[1], lengths)
    query = torch.randn(len(lengths), heads[0], DIM, generator=torch.Generator().manual_seed(seed + 1))
    ours._groups = None
    outputs = [
        backend._run_sdpa_forward_decode(
            query, torch.full_like(query, torch.nan), **given_, scaling=DIM**-0.5, enable_gqa=heads[0] != heads[1]
        )
        for backend in (theirs, ours)
    ]
    torch.testing.assert_close(outputs[1], outputs[0], atol=2e-5, rtol=1e-4)


def test_slots_that_hold_no_number_do_not_reach_a_shorter_request(backends: tuple[Any, Any]) -> None:
    given_ = caches(7, 2, [40, 30])
    spoilt = given_["req_to_token"][given_["req_pool_indices"][1], 35]
    given_["req_to_token"][given_["req_pool_indices"][0], :40] = torch.arange(40) + 1_000
    given_["k_cache"][spoilt] = torch.nan
    given_["v_cache"][spoilt] = torch.nan
    given_["k_cache"][1_000:1_040] = 1.0
    given_["v_cache"][1_000:1_040] = 1.0
    query = torch.ones(2, 4, DIM)
    backends[1]._groups = None
    output = backends[1]._run_sdpa_forward_decode(query, torch.empty_like(query), **given_, enable_gqa=True)
    assert torch.isfinite(output).all()


@given(lengths=st.lists(st.integers(1, 3_000), max_size=40))
def test_groups_hold_every_request_once_within_their_bounds(lengths: list[int]) -> None:
    groups = decode_groups(lengths, columns=1_024, waste=2.0)
    assert sorted(index for group in groups for index in group) == list(range(len(lengths)))
    for group in groups:
        padded = lengths[group[0]] * len(group)
        assert lengths[group[0]] == max(lengths[index] for index in group)
        assert len(group) == 1 or padded <= min(1_024, 2.0 * sum(lengths[index] for index in group))


def test_short_requests_share_a_call_and_long_ones_do_not() -> None:
    assert decode_groups([100, 3_000, 120, 90, 110]) == [[1], [2, 4, 0, 3]]
    assert decode_groups([1_000, 2]) == [[0], [1]]
    assert decode_groups([]) == []

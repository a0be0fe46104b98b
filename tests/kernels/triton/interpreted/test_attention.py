# SPDX-License-Identifier: Apache-2.0
"""Attention in the interpreter against fp64, over the cases of the CPU kernels.

Small, as the interpreter takes tens of milliseconds for a tile of 64 tokens.
"""

import pytest
import torch

from polykv_vllm import ops
from polykv_vllm.formats import FORMATS, FormatSpec
from polykv_vllm.keys import KeyTransform
from tests.gpu_cases import only_interpreted, run_triton
from tests.kernel_cases import BYTE_KEYS, DTYPES, make_batch, worst_ratio

pytestmark = only_interpreted

NAMED = pytest.mark.parametrize("fmt", BYTE_KEYS, ids=lambda f: f.name)
K8V3, K7V4 = FORMATS["polykv_k8v3"], FORMATS["polykv_k7v4"]


@NAMED
def test_decode_at_every_edge(fmt: FormatSpec) -> None:
    """Around a subtile (16), a block (32), a tile (64) and a split (512)."""
    lengths = (1, 17, 32, 63, 65, 512, 513)
    batch = make_batch(fmt, [(1, n) for n in lengths], kv_heads=1)
    assert worst_ratio(batch, run_triton(batch)) <= 1


@pytest.mark.parametrize(
    ("fmt", "head_dim"),
    [(K8V3, 128), (K7V4, 128), (K8V3, 256), (FORMATS["polykv_k8v4"], 128)],
    ids=str,
)
def test_head_sizes(fmt: FormatSpec, head_dim: int) -> None:
    batch = make_batch(fmt, [(1, 70), (2, 20)], head_dim=head_dim, kv_heads=1)
    assert worst_ratio(batch, run_triton(batch)) <= 1


@NAMED
def test_prefill_and_continuation(fmt: FormatSpec) -> None:
    """Chunks of more than 32 rows are chained, across a split of 512 too."""
    batch = make_batch(fmt, [(30, 30), (18, 520)], kv_heads=1)
    assert worst_ratio(batch, run_triton(batch)) <= 1


@pytest.mark.parametrize(
    ("group", "kv_heads", "dtype"),
    [(1, 2, DTYPES[0]), (3, 1, DTYPES[1]), (8, 1, DTYPES[2]), (12, 1, DTYPES[0])],
    ids=str,
)
def test_heads_groups_and_dtypes(group: int, kv_heads: int, dtype: torch.dtype) -> None:
    """A mixed batch: decode, prefill, an idle request, a few drafts, two decodes."""
    requests = [(1, 70), (9, 9), (0, 0), (2, 40), (1, 1)]
    batch = make_batch(K8V3, requests, kv_heads=kv_heads, group=group, dtype=dtype)
    assert worst_ratio(batch, run_triton(batch)) <= 1


@pytest.mark.parametrize("window", [1, 16, 64, 100, 600])
def test_sliding_windows(window: int) -> None:
    requests = [(1, 30), (1, 530), (40, 50)]
    batch = make_batch(K7V4, requests, kv_heads=1, window=window)
    assert worst_ratio(batch, run_triton(batch)) <= 1


@pytest.mark.parametrize("block_size", [16, 48, 128])
def test_block_sizes(block_size: int) -> None:
    batch = make_batch(K8V3, [(1, 140), (3, 50)], kv_heads=1, block_size=block_size)
    assert worst_ratio(batch, run_triton(batch)) <= 1


@pytest.mark.parametrize("rotate", [False, True])
def test_key_treatments(rotate: bool) -> None:
    transform = KeyTransform(torch.rand(2, 64) * 4 + 0.2, rotate)
    batch = make_batch(K8V3, [(1, 40), (5, 20)], key_transform=transform)
    assert worst_ratio(batch, run_triton(batch)) <= 1


@NAMED
def test_unused_slots_may_hold_anything(fmt: FormatSpec) -> None:
    """0xFF everywhere else: NaN scales, and block 0 is read for hidden tokens."""
    batch = make_batch(fmt, [(1, 33), (20, 20)], kv_heads=1)
    before = run_triton(batch)
    used = torch.zeros(batch.kv_cache.shape[0], dtype=torch.bool)
    used[[int(batch.block_table[0, 0])]] = True  # the only full block
    head_dim, block_size = 64, batch.kv_cache.shape[2]
    for request, block, tokens in ((0, 1, 1), (1, 0, 20)):
        from polykv_vllm.reference.lowbit import Quantized
        from polykv_vllm.reference.pack import pack_token, unpack_tile

        tile = batch.kv_cache[int(batch.block_table[request, block]), 0]
        key, value = unpack_tile(tile.reshape(-1).clone(), head_dim, fmt)
        fresh = torch.full((block_size * fmt.slot_bytes(head_dim),), 0xFF).byte()
        for token in range(tokens):
            rows = (Quantized(x.codes[token], x.scale[token]) for x in (key, value))
            pack_token(fresh, token, *rows, fmt)
        tile.copy_(fresh.view_as(tile))
    batch.kv_cache[0] = 0xFF
    assert torch.equal(run_triton(batch), before)


def test_a_poisoned_token_reaches_those_who_see_it() -> None:
    key = torch.randn(60, 1, 64)
    key[30, 0, 3] = torch.nan
    batch = make_batch(K8V3, [(30, 40), (1, 20)], kv_heads=1, group=2, key=key)
    got = run_triton(batch)
    position = torch.arange(10, 40)
    assert torch.equal(got[:30].isnan().all(-1).all(-1), position >= 30)
    assert got[:20].isfinite().all() and got[30].isfinite().all()


def test_a_query_that_is_not_finite_spoils_its_own_row_only() -> None:
    batch = make_batch(K8V3, [(1, 20), (1, 20)], kv_heads=1)
    batch.query[0, 1, 2] = torch.inf
    got = run_triton(batch)
    assert got[0, 1].isnan().all()
    assert got[0, 0].isfinite().all() and got[1].isfinite().all()


@pytest.mark.parametrize("norm", [0.0, 1e-20, 3000.0])
def test_queries_of_any_norm(norm: float) -> None:
    batch = make_batch(K8V3, [(1, 100), (3, 40)], kv_heads=1)
    batch.query.mul_(norm)
    assert worst_ratio(batch, run_triton(batch)) <= 1


def test_zero_values_count_in_the_denominator() -> None:
    value = torch.randn(90, 1, 64)
    value[::2] = 0
    batch = make_batch(K8V3, [(1, 90)], kv_heads=1, value=value)
    assert worst_ratio(batch, run_triton(batch)) <= 1
    silent = make_batch(K8V3, [(1, 90)], kv_heads=1, value=torch.zeros(90, 1, 64))
    assert torch.equal(run_triton(silent), torch.zeros_like(silent.query))


def test_what_is_missing_is_named() -> None:
    batch = make_batch(K8V3, [(1, 20)], kv_heads=1)
    with pytest.raises(NotImplementedError, match="no fast mode"):
        batch.run("triton", fast=True)
    for terms, name in (
        (ops.LogitTerms(soft_cap=30.0), "soft cap"),
        (ops.LogitTerms(sinks=torch.zeros(2)), "sinks"),
        (ops.LogitTerms(alibi_slopes=torch.ones(2)), "ALiBi"),
    ):
        with pytest.raises(NotImplementedError, match=name):
            ops.layer_attention(K8V3, 1.0, logits=terms, isa="triton")

# SPDX-License-Identifier: Apache-2.0
"""Our attention beside vLLM's own CPU kernel: the arguments mean the same."""

from typing import Any

import pytest
import torch

from polykv_vllm import ops
from polykv_vllm.formats import get_format
from polykv_vllm.reference.cache import gather

NUM_TOKENS, NUM_QUERIES, BLOCK_SIZE = 50, 20, 32
NUM_HEADS, NUM_KV_HEADS, HEAD_SIZE = 6, 2, 64
SCALE = HEAD_SIZE**-0.5
SLOTS = torch.arange(BLOCK_SIZE, BLOCK_SIZE + NUM_TOKENS)  # blocks 1 and 2
BLOCK_TABLE = torch.tensor([[1, 2]], dtype=torch.int32)
SEQ_LENS = torch.tensor([NUM_TOKENS], dtype=torch.int32)
QUERY_START = torch.tensor([0, NUM_QUERIES], dtype=torch.int32)


def vllm_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    window: int = -1,
    logits: ops.LogitTerms | None = None,
) -> torch.Tensor:
    """Attention of vLLM's CPU backend over an uncompressed cache."""
    from vllm import _custom_ops as vllm_ops

    logits = logits or ops.LogitTerms()
    head_size = query.shape[-1]
    isa = "vec" if head_size % 32 == 0 else "vec16"
    shape = (3, NUM_KV_HEADS, 2 * BLOCK_SIZE, head_size)
    key_cache, value_cache = torch.zeros(shape, dtype=query.dtype).chunk(2, dim=2)
    vllm_ops.cpu_attn_reshape_and_cache(key, value, key_cache, value_cache, SLOTS, isa)
    plan = vllm_ops.cpu_attn_get_scheduler_metadata(
        num_reqs=1,
        num_heads=NUM_HEADS,
        num_kv_heads=NUM_KV_HEADS,
        head_dim=head_size,
        seq_lens=SEQ_LENS,
        dtype=query.dtype,
        query_start_loc=QUERY_START,
        causal=True,
        sliding_window_size=window,
        isa=isa,
        enable_kv_split=False,
    )
    output = torch.empty_like(query)
    vllm_ops.cpu_attention_with_kv_cache(
        query=query,
        key_cache=key_cache,
        value_cache=value_cache,
        output=output,
        query_start_loc=QUERY_START,
        seq_lens=SEQ_LENS,
        scale=SCALE,
        causal=True,
        alibi_slopes=logits.alibi_slopes,
        sliding_window=window,
        block_table=BLOCK_TABLE,
        softcap=logits.soft_cap,
        scheduler_metadata=plan,
        s_aux=logits.sinks,
    )
    return output


def our_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return our output, and keys and values as the cache holds them."""
    fmt, head_size = get_format("polykv_k8v8"), query.shape[-1]
    shape = (3, NUM_KV_HEADS, BLOCK_SIZE, fmt.slot_bytes(head_size))
    cache = torch.zeros(shape, dtype=torch.uint8)
    ops.reshape_and_cache(key, value, cache, SLOTS, fmt)
    output = torch.empty_like(query)
    arguments = (BLOCK_TABLE, SEQ_LENS, QUERY_START, fmt, SCALE)
    ops.paged_attention(query, cache, output, *arguments, **options)
    return output, *gather(cache, BLOCK_TABLE[0], NUM_TOKENS, head_size, fmt)


def rows(head_size: int = HEAD_SIZE) -> tuple[torch.Tensor, ...]:
    """Queries, keys and values of norm sqrt(head_size)."""
    query = torch.randn(NUM_QUERIES, NUM_HEADS, head_size)
    return query, *torch.randn(2, NUM_TOKENS, NUM_KV_HEADS, head_size)


@pytest.mark.parametrize("window", [-1, 1, 4, 20, 33, 64])
def test_windows_mean_the_same(window: int) -> None:
    query, key, value = rows()
    output, *_ = our_attention(query, key, value, sliding_window=window)
    # Half a step of int8 values: 3 sigma / 127 / 2, and keys alike. One token more or
    # less in a window of at most 33 moves some row by far more.
    expected = vllm_attention(query, key, value, window)
    assert (output - expected).abs().max() < 0.05
    if 0 < window < NUM_TOKENS:
        other = vllm_attention(query, key, value, window + 1)
        assert (output - other).abs().max() > 0.2


SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625, 0.01, 1.0])
SINKS = torch.tensor([0.0, 3.0, -4.0, 8.0, -50.0, 2.0])
TERMS = {
    "cap": ops.LogitTerms(soft_cap=2.0),
    "alibi": ops.LogitTerms(alibi_slopes=SLOPES),
    "sinks": ops.LogitTerms(sinks=SINKS),
    "cap-sinks": ops.LogitTerms(soft_cap=2.0, sinks=SINKS),
    "cap-alibi": ops.LogitTerms(soft_cap=2.0, alibi_slopes=SLOPES),
    "alibi-sinks": ops.LogitTerms(alibi_slopes=SLOPES, sinks=SINKS),
}


@pytest.mark.parametrize("kind", TERMS)
@pytest.mark.parametrize("window", [-1, 20])
def test_terms_mean_the_same(kind: str, window: int) -> None:
    """On equal keys and values, those that the cache holds, in fp32.

    What is left is our arithmetic, about 1e-4 of the values (docs/architecture.md),
    which reach 3 to 4.
    """
    query, key, value = rows()
    query *= 2
    terms = TERMS[kind]
    output, key, value = our_attention(
        query, key, value, sliding_window=window, logits=terms
    )
    expected = vllm_attention(query, key, value, window, terms)
    assert (output - expected).abs().max() < 5e-4
    plain = vllm_attention(query, key, value, window)
    assert (output - plain).abs().max() > 0.1

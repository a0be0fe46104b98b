# SPDX-License-Identifier: Apache-2.0
"""Our attention beside vLLM's own CPU kernel: the arguments mean the same."""

import pytest
import torch

from polykv_vllm import ops
from polykv_vllm.formats import get_format

NUM_TOKENS, NUM_QUERIES, BLOCK_SIZE = 50, 20, 32
NUM_HEADS, NUM_KV_HEADS, HEAD_SIZE = 6, 2, 64
SCALE = HEAD_SIZE**-0.5
SLOTS = torch.arange(BLOCK_SIZE, BLOCK_SIZE + NUM_TOKENS)  # blocks 1 and 2
BLOCK_TABLE = torch.tensor([[1, 2]], dtype=torch.int32)
SEQ_LENS = torch.tensor([NUM_TOKENS], dtype=torch.int32)
QUERY_START = torch.tensor([0, NUM_QUERIES], dtype=torch.int32)


def vllm_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, window: int
) -> torch.Tensor:
    """Attention of vLLM's CPU backend over an uncompressed fp32 cache."""
    from vllm import _custom_ops as vllm_ops

    cache = torch.zeros(3, NUM_KV_HEADS, 2 * BLOCK_SIZE, HEAD_SIZE)
    key_cache, value_cache = cache.chunk(2, dim=2)
    vllm_ops.cpu_attn_reshape_and_cache(
        key, value, key_cache, value_cache, SLOTS, "vec"
    )
    plan = vllm_ops.cpu_attn_get_scheduler_metadata(
        num_reqs=1,
        num_heads=NUM_HEADS,
        num_kv_heads=NUM_KV_HEADS,
        head_dim=HEAD_SIZE,
        seq_lens=SEQ_LENS,
        dtype=query.dtype,
        query_start_loc=QUERY_START,
        causal=True,
        sliding_window_size=window,
        isa="vec",
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
        alibi_slopes=None,
        sliding_window=window,
        block_table=BLOCK_TABLE,
        softcap=0.0,
        scheduler_metadata=plan,
        s_aux=None,
    )
    return output


@pytest.mark.parametrize("window", [-1, 1, 4, 20, 33, 64])
def test_windows_mean_the_same(window: int) -> None:
    query = torch.randn(NUM_QUERIES, NUM_HEADS, HEAD_SIZE)
    key, value = torch.randn(2, NUM_TOKENS, NUM_KV_HEADS, HEAD_SIZE)
    fmt = get_format("polykv_k8v8")
    shape = (3, NUM_KV_HEADS, BLOCK_SIZE, fmt.slot_bytes(HEAD_SIZE))
    cache = torch.zeros(shape, dtype=torch.uint8)
    ops.reshape_and_cache(key, value, cache, SLOTS, fmt)
    output = torch.empty_like(query)
    ops.paged_attention(
        query,
        cache,
        output,
        BLOCK_TABLE,
        SEQ_LENS,
        QUERY_START,
        fmt,
        SCALE,
        window,
    )
    # Half a step of int8 values: 3 sigma / 127 / 2, and keys alike. One token more or
    # less in a window of at most 33 moves some row by far more.
    expected = vllm_attention(query, key, value, window)
    assert (output - expected).abs().max() < 0.05
    if 0 < window < NUM_TOKENS:
        other = vllm_attention(query, key, value, window + 1)
        assert (output - other).abs().max() > 0.2

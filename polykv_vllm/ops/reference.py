# SPDX-License-Identifier: Apache-2.0
"""The torch oracle behind the ops' signatures (isa "reference"); slow."""

import torch

from polykv_vllm.formats import FormatSpec
from polykv_vllm.ops.table import validate_cache
from polykv_vllm.reference import attention, cache


def _check(kv_cache: torch.Tensor, fmt: FormatSpec, head_dim: int) -> None:
    slot_bytes = fmt.slot_bytes(head_dim)
    validate_cache(kv_cache.shape, kv_cache.stride(), kv_cache.dtype, slot_bytes)


def store(
    key: torch.Tensor,
    value: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    fmt: FormatSpec,
    num_threads: int,
) -> None:
    """See `ops.reshape_and_cache`."""
    del num_threads
    _check(kv_cache, fmt, key.shape[-1])
    cache.reshape_and_cache(key, value, kv_cache, slot_mapping, fmt)


def attend(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    output: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    fmt: FormatSpec,
    scale: float,
    sliding_window: int,
    shared: tuple[torch.Tensor, torch.Tensor] | None,
    num_threads: int,
) -> None:
    """See `ops.paged_attention`. What is shared is read again for every request."""
    del shared, num_threads
    _check(kv_cache, fmt, query.shape[-1])
    attention.paged_attention(
        query,
        kv_cache,
        output,
        block_table,
        seq_lens,
        query_start_loc,
        fmt,
        scale,
        sliding_window,
    )

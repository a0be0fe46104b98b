# SPDX-License-Identifier: Apache-2.0
"""The paged cache in plain torch: write rows to slots, read sequences back."""

import torch

from polykv_vllm.formats import FormatSpec
from polykv_vllm.reference.lowbit import Quantized
from polykv_vllm.reference.pack import pack_token, unpack_tile
from polykv_vllm.reference.quantize import (
    dequantize_key,
    dequantize_value,
    quantize_key,
    quantize_value,
)


def _quantize(
    key: torch.Tensor, value: torch.Tensor, fmt: FormatSpec
) -> tuple[Quantized, Quantized]:
    # A token with an inf or a NaN anywhere is poisoned as a whole: both scales NaN.
    poisoned = ~(key.isfinite().all(-1) & value.isfinite().all(-1))
    clean = ~poisoned.unsqueeze(-1)
    nan = torch.tensor(torch.nan, dtype=torch.bfloat16)
    out = []
    for rows, quantize in ((key, quantize_key), (value, quantize_value)):
        # where, not a product: 0 * inf is NaN.
        each = quantize(torch.where(clean, rows, torch.zeros_like(rows)), fmt)
        out.append(each._replace(scale=torch.where(poisoned, nan, each.scale)))
    return out[0], out[1]


def _at(rows: Quantized, token: int, head: int) -> Quantized:
    return Quantized(*(None if part is None else part[token, head] for part in rows))


def reshape_and_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    fmt: FormatSpec,
) -> None:
    """Quantize and write rows; arguments as `ops.reshape_and_cache`."""
    num_tokens = slot_mapping.shape[0]
    block_size = kv_cache.shape[2]
    keys, values = _quantize(key[:num_tokens].float(), value[:num_tokens].float(), fmt)
    for token, slot in enumerate(slot_mapping.tolist()):
        if slot < 0:
            continue
        block, offset = divmod(slot, block_size)
        for head in range(kv_cache.shape[1]):
            pack_token(
                kv_cache[block, head].reshape(-1),
                offset,
                _at(keys, token, head),
                _at(values, token, head),
                fmt,
            )


def gather(
    kv_cache: torch.Tensor,
    blocks: torch.Tensor,
    seq_len: int,
    head_dim: int,
    fmt: FormatSpec,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Dequantize one sequence.

    Args:
        kv_cache: `[num_blocks, num_kv_heads, block_size, slot_bytes]` uint8.
        blocks: `[>= seq_len / block_size]` block numbers.
        seq_len: Tokens.
        head_dim: Elements per head.
        fmt: The cache's format.

    Returns:
        Keys and values, `[seq_len, num_kv_heads, head_dim]` fp32.

    """
    block_size = kv_cache.shape[2]
    keys, values = [], []
    for block in blocks[: -(-seq_len // block_size)].tolist():
        tiles = [
            unpack_tile(kv_cache[block, head].reshape(-1), head_dim, fmt)
            for head in range(kv_cache.shape[1])
        ]
        keys.append(torch.stack([dequantize_key(k) for k, _ in tiles], 1))
        values.append(torch.stack([dequantize_value(v, fmt) for _, v in tiles], 1))
    return torch.cat(keys)[:seq_len], torch.cat(values)[:seq_len]

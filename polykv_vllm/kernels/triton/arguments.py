# SPDX-License-Identifier: Apache-2.0
"""What the kernels are given, checked: dtypes, shapes, strides, alignment."""

from typing import Any

import torch

from polykv_vllm.formats import FormatSpec
from polykv_vllm.kernels.triton.tile import Tile, tile_of
from polykv_vllm.keys import KeyTransform

DTYPES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
"""Numbers of the dtypes in kernels (rows.py)."""


def kernel_rows(name: str, rows: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Check `[num_tokens, heads, head_dim]` rows; return them as the kernels read them.

    Raises:
        ValueError: They have another dtype, shape or stride.

    """
    if rows.dtype not in DTYPES:
        raise ValueError(f"{name} must be bf16, fp16 or fp32, not {rows.dtype}")
    if rows.dim() != 3 or tuple(rows.shape[1:]) != shape or rows.stride(2) != 1:
        raise ValueError(
            f"{name} must be [num_tokens, {shape[0]}, {shape[1]}] with a contiguous "
            f"last dimension, not {list(rows.shape)} with strides {rows.stride()}"
        )
    return rows.view(torch.int16) if rows.dtype == torch.bfloat16 else rows


def kernel_tile(kv_cache: torch.Tensor, fmt: FormatSpec, head_dim: int) -> Tile:
    """Check a cache; return the constants of its tiles.

    Raises:
        ValueError: It is not the format's, or not aligned to 16 bytes.

    """
    tile = tile_of(fmt, head_dim, kv_cache.shape[2])
    slot_bytes = kv_cache.shape[3]
    want = (torch.uint8, fmt.slot_bytes(head_dim), slot_bytes, 1)
    if (kv_cache.dtype, slot_bytes, *kv_cache.stride()[2:]) != want:
        raise ValueError(
            f"kv_cache must be uint8 [num_blocks, num_kv_heads, block_size, {want[1]}] "
            f"with contiguous tiles, not {kv_cache.dtype} {list(kv_cache.shape)} with "
            f"strides {kv_cache.stride()}"
        )
    if any(x % 16 for x in (kv_cache.data_ptr(), *kv_cache.stride()[:2])):
        raise ValueError("the tiles of kv_cache must be aligned to 16 bytes")
    return tile


def check_logits(logits: Any) -> None:
    """Refuse what `ops.LogitTerms` can say and the kernels cannot do yet.

    Raises:
        NotImplementedError: There is a soft cap, a slope or a sink.

    """
    if logits is None:
        return
    asked = {
        "a logits soft cap": logits.soft_cap > 0,
        "ALiBi slopes": logits.alibi_slopes is not None,
        "attention sinks": logits.sinks is not None,
    }
    if names := [name for name, is_asked in asked.items() if is_asked]:
        raise NotImplementedError(
            f"the Triton kernels have no {' and no '.join(names)} yet; the CPU kernels "
            "have"
        )


def check_transform(transform: KeyTransform) -> None:
    """Refuse key transforms of calibrations, which belong to formats of few bits.

    Raises:
        NotImplementedError: There are matrices or centers.

    """
    asked = {"matrices": transform.matrices, "centers": transform.centers}
    if names := [name for name, numbers in asked.items() if numbers is not None]:
        raise NotImplementedError(
            f"the Triton kernels transform keys without {' and '.join(names)}; the CPU "
            "kernels have them"
        )


def on_device(tensor: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor | None:
    """Return a tensor, if any, contiguous on the device of another."""
    return None if tensor is None else tensor.to(like.device).contiguous()

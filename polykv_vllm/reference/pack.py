# SPDX-License-Identifier: Apache-2.0
"""Codes and scales <-> the bytes of a tile, one bit at a time through the layout.

Deliberately naive: the place of every bit is asked of `formats.TileLayout`, so this
shares no logic with the kernels' packing.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from polykv_vllm.formats import CODEBOOKS, FormatSpec, TileLayout
from polykv_vllm.reference.lowbit import Quantized


class _Places:
    """Byte and bit number of every code bit of a tile: `[token, dim, bit, 2]`."""

    def __init__(self, layout: TileLayout) -> None:
        tokens, dims = range(layout.block_size), range(layout.head_dim)
        spec = layout.spec

        def table(place: Callable[[int, int, int], tuple[int, int]], bits: int) -> Any:
            return torch.tensor(
                [[[place(t, d, b) for b in range(bits)] for d in dims] for t in tokens]
            )

        self.key_bit = table(layout.key_bit, spec.key_bits)
        self.value_bit = table(layout.value_bit, spec.value_bits)


@cache
def _places(fmt: FormatSpec, head_dim: int, block_size: int) -> _Places:
    return _Places(TileLayout(fmt, head_dim, block_size))


def _key_levels(fmt: FormatSpec) -> torch.Tensor:
    return torch.tensor(CODEBOOKS[fmt.key_bits].levels, dtype=torch.int32)


def _scale_bytes(scale: torch.Tensor) -> torch.Tensor:
    return scale.contiguous().view(torch.uint8)


def pack_token(
    tile: torch.Tensor, token: int, key: Quantized, value: Quantized, fmt: FormatSpec
) -> None:
    """Write one token into a tile, touching no other token's bytes.

    Args:
        tile: `[tile_bytes]` uint8; written.
        token: Index in the block.
        key: Codes `[head_dim]`, scale `[]`.
        value: Codes `[head_dim]`, scale `[]`.
        fmt: The tile's format.

    """
    head_dim = key.codes.shape[-1]
    block_size = tile.numel() // fmt.slot_bytes(head_dim)
    layout = TileLayout(fmt, head_dim, block_size)
    places = _places(fmt, head_dim, block_size)
    key_codes = key.codes
    if fmt.key_quantizer == "symmetric":
        key_codes = key_codes + fmt.key_bias
    elif fmt.key_quantizer == "codebook":
        key_codes = torch.bucketize(key_codes, _key_levels(fmt))
    written = torch.zeros(tile.numel(), dtype=torch.int64)
    fresh = written.clone()
    for place, codes in (
        (places.key_bit[token], key_codes),
        (places.value_bit[token], value.codes),
    ):
        # The bits of a token's codes are distinct places, so adding them is or.
        where, number = place[..., 0].reshape(-1), place[..., 1].reshape(-1)
        bits = codes.unsqueeze(-1) >> torch.arange(place.shape[1]) & 1
        written.index_add_(0, where, 1 << number)
        fresh.index_add_(0, where, bits.reshape(-1) << number)
    tile.copy_((tile.long() & ~written | fresh).to(torch.uint8))
    for offset, scale in _scalars(layout, key, value):
        if scale is not None:
            first = offset + 2 * token
            tile[first : first + 2] = _scale_bytes(scale.reshape(1))


def _scalars(
    layout: TileLayout, key: Quantized, value: Quantized
) -> list[tuple[int, torch.Tensor | None]]:
    return [
        (layout.key_scales_offset, key.scale),
        (layout.value_scales_offset, value.scale),
        (layout.key_minimums_offset, key.minimum),
        (layout.value_minimums_offset, value.minimum),
    ]


def unpack_tile(
    tile: torch.Tensor, head_dim: int, fmt: FormatSpec
) -> tuple[Quantized, Quantized]:
    """Read every token of a tile, or of many.

    Args:
        tile: `[..., tile_bytes]` uint8.
        head_dim: Elements per head.
        fmt: The tile's format.

    Returns:
        Keys and values: codes `[..., block_size, head_dim]` int32, scales
        `[..., block_size]`.

    """
    block_size = tile.shape[-1] // fmt.slot_bytes(head_dim)
    layout = TileLayout(fmt, head_dim, block_size)
    places = _places(fmt, head_dim, block_size)
    wide = tile.int()

    def codes(place: torch.Tensor) -> torch.Tensor:
        bits = wide[..., place[..., 0]] >> place[..., 1] & 1
        return (bits << torch.arange(place.shape[2])).sum(-1, dtype=torch.int32)

    def scalars(offset: int) -> torch.Tensor:
        return tile[..., offset : offset + 2 * block_size].clone().view(torch.bfloat16)

    key_codes, value_codes = codes(places.key_bit), codes(places.value_bit)
    if fmt.key_quantizer == "symmetric":
        key_codes = key_codes - fmt.key_bias
    elif fmt.key_quantizer == "codebook":
        key_codes = _key_levels(fmt)[key_codes.long()]
    if fmt.value_quantizer == "symmetric":
        value_codes = value_codes.to(torch.int8).int()
    key_affine, value_affine = (size > 0 for size in fmt.minimum_bytes)
    return (
        Quantized(
            key_codes,
            scalars(layout.key_scales_offset),
            scalars(layout.key_minimums_offset) if key_affine else None,
        ),
        Quantized(
            value_codes,
            scalars(layout.value_scales_offset),
            scalars(layout.value_minimums_offset) if value_affine else None,
        ),
    )

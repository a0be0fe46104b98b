# SPDX-License-Identifier: Apache-2.0
"""Codes and scales <-> the bytes of a tile, one bit at a time through the layout.

Deliberately naive: the place of every bit is asked of `formats.TileLayout`, so this
shares no logic with the kernels' packing.
"""

from functools import cache

import torch

from polykv_vllm.formats import FormatSpec, TileLayout
from polykv_vllm.reference.quantize import Quantized


class _Places:
    """Byte and bit number of every code bit of a tile."""

    def __init__(self, layout: TileLayout) -> None:
        tokens, dims = range(layout.block_size), range(layout.head_dim)
        spec = layout.spec
        self.key_byte = torch.tensor(
            [[layout.key_byte(t, d) for d in dims] for t in tokens]
        )
        bits = [
            [[layout.value_bit(t, d, b) for b in range(spec.value_bits)] for d in dims]
            for t in tokens
        ]
        self.value_bit = torch.tensor(bits)  # [token, dim, bit, (byte, number)]


@cache
def _places(fmt: FormatSpec, head_dim: int, block_size: int) -> _Places:
    return _Places(TileLayout(fmt, head_dim, block_size))


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
    tile[places.key_byte[token]] = (key.codes + fmt.key_bias).to(torch.uint8)
    # The bits of a token's value codes are distinct places, so adding them is or.
    where = places.value_bit[token, ..., 0].reshape(-1)
    number = places.value_bit[token, ..., 1].reshape(-1)
    code_bits = value.codes.unsqueeze(-1) >> torch.arange(fmt.value_bits) & 1
    written = torch.zeros(tile.numel(), dtype=torch.int64)
    fresh = written.clone()
    written.index_add_(0, where, 1 << number)
    fresh.index_add_(0, where, code_bits.reshape(-1) << number)
    tile.copy_((tile.long() & ~written | fresh).to(torch.uint8))
    for offset, scale in (
        (layout.key_scales_offset, key.scale),
        (layout.value_scales_offset, value.scale),
    ):
        tile[offset + 2 * token : offset + 2 * token + 2] = _scale_bytes(
            scale.reshape(1)
        )


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
    key_mask = (1 << fmt.key_bits) - 1
    key_codes = (wide[..., places.key_byte] & key_mask) - fmt.key_bias
    number = torch.arange(fmt.value_bits)
    raw = wide[..., places.value_bit[..., 0]] >> places.value_bit[..., 1] & 1
    value_codes = (raw << number).sum(-1, dtype=torch.int32)
    if fmt.value_rotation == "none":
        value_codes = value_codes.to(torch.int8).int()
    scales = [
        tile[..., offset : offset + 2 * block_size].clone().view(torch.bfloat16)
        for offset in (layout.key_scales_offset, layout.value_scales_offset)
    ]
    return Quantized(key_codes, scales[0]), Quantized(value_codes, scales[1])

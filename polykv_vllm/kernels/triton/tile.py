# SPDX-License-Identifier: Apache-2.0
"""What the kernels know of a tile at compile time, taken from `formats/`."""

from dataclasses import dataclass
from functools import cache
from itertools import pairwise

from polykv_vllm.formats import CODEBOOKS, FORMATS, FormatSpec
from polykv_vllm.formats.gpu_layout import GpuTileLayout
from polykv_vllm.formats.registry import SUPPORTED_HEAD_DIMS

HEAD_DIMS = (64, 128, 256)
"""Head dimensions of these kernels: powers of two, as Triton's tensors are."""


@dataclass(frozen=True)
class Tile:
    """Constants of one (format, head dimension, block size); a constexpr of kernels.

    Attributes:
        head_dim: Elements per head.
        log2_dim: Its logarithm.
        block_size: Tokens per block.
        key_bits: 7 or 8.
        plane_bits: Value bits in the value section: 3, 4 or 8.
        rotated: Whether values are stored rotated.
        levels: int8 level of each value code; empty without a codebook.
        boundaries: Decision points of the codebook.
        square_steps: By how much the squared level grows at each of them.
        values_at: Offset of the value codes.
        high_at: Offset of the high plane of 3-bit codes.
        key_scales_at: Offset of the key scales.
        value_scales_at: Offset of the value scales.

    """

    head_dim: int
    log2_dim: int
    block_size: int
    key_bits: int
    plane_bits: int
    rotated: bool
    levels: tuple[int, ...]
    boundaries: tuple[float, ...]
    square_steps: tuple[int, ...]
    values_at: int
    high_at: int
    key_scales_at: int
    value_scales_at: int


@cache
def tile_of(fmt: FormatSpec, head_dim: int, block_size: int) -> Tile:
    """Return the constants for a format.

    Raises:
        NotImplementedError: There is no kernel for the format or head dimension.
        ValueError: The block size is no multiple of 16.

    """
    served = [name for name, spec in FORMATS.items() if not spec.is_low_bit]
    if fmt not in FORMATS.values() or fmt.name not in served:
        raise NotImplementedError(
            f"no Triton kernel for {fmt}; available: {', '.join(served)}"
        )
    if head_dim not in HEAD_DIMS and head_dim in SUPPORTED_HEAD_DIMS:
        raise NotImplementedError(
            f"no Triton kernel for head size {head_dim}; available: "
            f"{', '.join(map(str, HEAD_DIMS))}"
        )
    layout = GpuTileLayout(fmt, head_dim, block_size)
    book = None if fmt.value_rotation == "none" else CODEBOOKS[fmt.value_bits]
    levels = book.levels if book else ()
    return Tile(
        head_dim=head_dim,
        log2_dim=head_dim.bit_length() - 1,
        block_size=block_size,
        key_bits=fmt.key_bits,
        plane_bits=fmt.value_plane_bits,
        rotated=book is not None,
        levels=levels,
        boundaries=book.boundaries if book else (),
        square_steps=tuple(b * b - a * a for a, b in pairwise(levels)),
        values_at=layout.value_codes_offset,
        high_at=layout.value_high_plane_offset,
        key_scales_at=layout.key_scales_offset,
        value_scales_at=layout.value_scales_offset,
    )

# SPDX-License-Identifier: Apache-2.0
"""The order of a tile's bytes on GPUs: the same bytes as on the CPU, elsewhere.

The sections lie where `TileLayout` has them; only the order inside the two sections
of codes differs:

    | key codes     [N][D/64][8][8]     byte (c, i, j) holds dim 64c + 8j + i
    | value planes  [N/16][rows][16 tokens], rows as in `layout.py`

Why not the CPU's order: a GPU's 8-bit matrix instruction takes four neighbouring
dimensions of a key from one register, and `ldmatrix` fills registers from rows of 16
bytes. So a token's key is one row, read 16 bytes at a time, and a value plane is a row
of 16 tokens, since the values' sum runs over tokens. In the CPU's order both would be
read four bytes at a time, each in another 32-byte sector.

The keys' dimensions are permuted so that eight neighbouring bytes hold the dimensions
whose 3-bit codes share a byte of the high plane: in formats with 7-bit keys their top
bits then become one such byte without leaving a thread. Queries are written in the
same order, so no product notices.
"""

from dataclasses import dataclass

from polykv_vllm.formats.layout import TileLayout

GPU_LAYOUT_ID = "gpu_row_v1"
"""Identity of this order."""

_SUBTILE = 16


@dataclass(frozen=True)
class GpuTileLayout(TileLayout):
    """Byte offsets in one tile of a format in the order for GPUs."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.spec.is_low_bit:
            raise ValueError(f"{self.spec.name} has no order for GPUs")

    def key_byte(self, token: int, dim: int) -> int:
        """Offset of the byte with the key code of (token, dim)."""
        chunk, rest = divmod(dim, 64)
        row, column = divmod(rest, 8)
        return token * self.head_dim + chunk * 64 + column * 8 + row

    def _value_byte(self, quad: int, column: int, row: int, rows: int) -> int:
        # A plane is [subtiles][rows][16 tokens] bytes.
        subtile, lane = divmod(quad * 4 + column, _SUBTILE)
        return self.value_codes_offset + (subtile * rows + row) * _SUBTILE + lane


def byte_permutation(source: TileLayout, target: TileLayout) -> list[int]:
    """Return, for each byte of a tile in the target's order, its place in the source's.

    `tile_target = tile_source[permutation]`; swapping the arguments gives the inverse.

    Args:
        source: A layout of a format, head dimension and block size.
        target: Another order of the same.

    Raises:
        ValueError: The two are not of the same format and shape.

    """
    shape = (source.spec, source.head_dim, source.block_size)
    if shape != (target.spec, target.head_dim, target.block_size):
        raise ValueError(f"{source} and {target} are tiles of different contents")
    order = list(range(source.tile_bytes))  # scales lie alike
    for token in range(source.block_size):
        for dim in range(source.head_dim):
            order[target.key_byte(token, dim)] = source.key_byte(token, dim)
            for bit in range(source.spec.value_plane_bits):
                place, _ = target.value_bit(token, dim, bit)
                order[place], _ = source.value_bit(token, dim, bit)
    return order

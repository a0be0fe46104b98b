# SPDX-License-Identifier: Apache-2.0
"""Where each bit lies inside a tile: the only place that knows offsets.

A tile is the memory of one (block, KV head): `block_size` tokens, contiguous.

    | key codes        N*D*k/8    see below, k = key_plane_bits
    | value codes      N*D*b/8    see below, b = value_plane_bits
    | key scales       N*2        bf16 [N]
    | value scales     N*2        bf16 [N]
    | key minimums     N*2        bf16 [N], with affine keys
    | value minimums   N*2        bf16 [N], with affine values

Every byte belongs to one token, so appending a token never rewrites another's.
Sixteen tokens (a subtile) lie beside each other in the key codes, four dims of each,
because an int8 dot product over dims consumes them so:

    k = 8   [N/16][D/4][16 tokens][4]
    k = 4   [N/16][D/8][16][4]    low nibble: dim 8c+j, high nibble: dim 8c+4+j
    k = 2   [N/16][D/16][16][4]   bits 2f, 2f+1: dim 16c+4f+j
    k = 3   low plane   as k = 2, the low bits
            high plane  [N/16][D/32][16][4]  bit 4h+f: top bit of dim 32c+16h+4f+j

Four tokens (a quad) lie byte by byte beside each other in the value codes, because a
dot product over tokens consumes them so:

    b = 8   [N/4][D/16][16][4]   the level itself, int8
    b = 4   [N/4][D/32][16][4]   low nibble: dim 32c+i, high nibble: dim 32c+16+i
    b = 2   [N/4][D/64][16][4]   bits 2f, 2f+1: dim 64c+16f+i
    b = 3   low plane   as b = 2, the low bits
            high plane  [N/4][D/64][8][4]   bit f+4h: top bit of dim 64c+16f+8h+i

(c: chunk, i: index in the third axis, j: in the fourth, f in 0..3, h in 0..1.) Where D
is no multiple of a chunk's dims, what is left of values forms one chunk of 32 dims, of
16, or of 32 and then 16: in the lines above 16 becomes 8 or 4, 8 becomes 4 or 2, and so
on. With 7-bit keys bit 7 of the key byte of dim d holds the top bit of the value code
of dim d.

The key order serves AVX-512 VNNI (one load = 4 dims of 16 tokens), AVX2 and AMX
(one 16-row tile = 64 dims of 16 tokens) alike; of fewer bits, shifts and masks of one
load give two or four such rows. `LAYOUT_ID` names this order.
"""

from dataclasses import dataclass

from polykv_vllm.formats.registry import FormatSpec

LAYOUT_ID = "cpu_quad_v1"
"""Identity of the physical order; a tile of another order is never readable."""

BLOCK_SIZE_MULTIPLE = 16
"""Tokens in a subtile; block sizes must be multiples of it."""

WINDOW_PAGE_TOKENS = 32
"""Tokens of a raw page, which begin at a multiple of this in their sequence."""

_SUBTILE = 16
_QUAD = 4


@dataclass(frozen=True)
class TileLayout:
    """Byte offsets in one tile of a format.

    Attributes:
        spec: The format.
        head_dim: Elements per head; one of the supported head dimensions.
        block_size: Tokens per block; a multiple of `BLOCK_SIZE_MULTIPLE`.

    """

    spec: FormatSpec
    head_dim: int
    block_size: int

    def __post_init__(self) -> None:
        self.spec.check_head_dim(self.head_dim)
        if self.block_size <= 0 or self.block_size % BLOCK_SIZE_MULTIPLE:
            raise ValueError(
                f"block size {self.block_size} is not a positive multiple of "
                f"{BLOCK_SIZE_MULTIPLE}"
            )

    @property
    def tile_bytes(self) -> int:
        """Bytes of one (block, KV head)."""
        return self.block_size * self.spec.slot_bytes(self.head_dim)

    @property
    def value_codes_offset(self) -> int:
        """First byte of the value codes (key codes start at 0)."""
        return self.block_size * self.head_dim * self.spec.key_plane_bits // 8

    @property
    def key_high_plane_offset(self) -> int:
        """First byte of the high plane of 3-bit key codes."""
        return self.block_size * self.head_dim // 4

    @property
    def key_scales_offset(self) -> int:
        """First byte of the key scales."""
        value_bytes = self.block_size * self.head_dim * self.spec.value_plane_bits // 8
        return self.value_codes_offset + value_bytes

    @property
    def value_scales_offset(self) -> int:
        """First byte of the value scales."""
        return self.key_scales_offset + 2 * self.block_size

    @property
    def value_high_plane_offset(self) -> int:
        """First byte of the high plane of 3-bit value codes."""
        return self.value_codes_offset + self.block_size * self.head_dim // 4

    @property
    def key_minimums_offset(self) -> int:
        """First byte of the minimums of affine keys."""
        return self.value_scales_offset + 2 * self.block_size

    @property
    def value_minimums_offset(self) -> int:
        """First byte of the minimums of affine values."""
        return self.key_minimums_offset + self.spec.minimum_bytes[0] * self.block_size

    def key_byte(self, token: int, dim: int) -> int:
        """Offset of the byte with the key code of (token, dim), of 7 bits or more."""
        row, column = divmod(dim, 4)
        return self._key_byte(0, token, row, column, self.head_dim // 4)

    def key_bit(self, token: int, dim: int, bit: int) -> tuple[int, int]:
        """Place of one bit (0 = lowest) of the key code of (token, dim).

        Returns:
            Offset of the byte in the tile, and the bit's number in that byte.

        """
        bits = self.spec.key_plane_bits
        if bits == 8:
            return self.key_byte(token, dim), bit
        row, column = divmod(dim, 4)
        if bits == 4:
            chunk, high = divmod(row, 2)
            rows = self.head_dim // 8
            return self._key_byte(0, token, chunk, column, rows), 4 * high + bit
        if bit < 2:
            chunk, field = divmod(row, 4)
            rows = self.head_dim // 16
            return self._key_byte(0, token, chunk, column, rows), 2 * field + bit
        chunk, number = divmod(row, 8)
        plane, rows = self.key_high_plane_offset, self.head_dim // 32
        return self._key_byte(plane, token, chunk, column, rows), number

    def _key_byte(
        self, plane: int, token: int, row: int, column: int, rows: int
    ) -> int:
        # A plane is [subtiles][rows][16 tokens][4] bytes.
        subtile, lane = divmod(token, _SUBTILE)
        return plane + ((subtile * rows + row) * _SUBTILE + lane) * 4 + column

    def value_bit(self, token: int, dim: int, bit: int) -> tuple[int, int]:
        """Place of one bit (0 = lowest) of the value code of (token, dim).

        Returns:
            Offset of the byte in the tile, and the bit's number in that byte.

        """
        if bit >= self.spec.value_plane_bits:
            return self.key_byte(token, dim), 7
        quad, column = divmod(token, _QUAD)
        if self.spec.value_plane_bits == 8:
            return self._value_byte(quad, column, dim, self.head_dim), bit
        if self.spec.value_plane_bits == 4:
            begin, size = self._chunk(dim, 32)
            high, index = divmod(dim - begin, size // 2)
            row = begin // 2 + index
            return self._value_byte(
                quad, column, row, self.head_dim // 2
            ), 4 * high + bit
        return self._value_plane_bit(quad, column, dim, bit)

    def _chunk(self, dim: int, whole: int) -> tuple[int, int]:
        """Return the first dim and the dims of the chunk that holds `dim`."""
        begin, size = dim // whole * whole, whole
        while True:
            if begin + size <= self.head_dim:
                if dim < begin + size:
                    return begin, size
                begin += size
            size //= 2

    def _value_byte(self, quad: int, column: int, row: int, rows: int) -> int:
        # A plane is [quads][rows][4 tokens] bytes.
        return self.value_codes_offset + (quad * rows + row) * _QUAD + column

    def _value_plane_bit(
        self, quad: int, column: int, dim: int, bit: int
    ) -> tuple[int, int]:
        begin, size = self._chunk(dim, 64)
        field, lane = divmod(dim - begin, size // 4)
        if bit < 2:
            row = begin // 4 + lane
            low = self._value_byte(quad, column, row, self.head_dim // 4)
            return low, 2 * field + bit
        half, index = divmod(lane, size // 8)
        row = begin // 8 + index
        high = self._value_byte(quad, column, row, self.head_dim // 8)
        plane = self.value_high_plane_offset - self.value_codes_offset
        return high + plane, field + 4 * half

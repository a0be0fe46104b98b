# SPDX-License-Identifier: Apache-2.0
"""Device code from packed tiles to the int8 operands of the matrix products.

A tile of 64 tokens is read 16 bytes at a time. Keys become int8 codes (7-bit keys
stay biased: their bias is one number a query row). A value plane's byte holds several
dimensions of one token; they are taken apart into eight octets: octet e holds the
dimensions 64c + 8e + i. Each octet is an operand of its own: joined, they would lie in
registers dimension by dimension, and the way to the operand would go byte by byte.

On a GPU four bytes share a register and `assembly.py` has the few instructions that
handle them together. The plain branch says the same element by element: the
interpreter runs it, and the device check compares the two.
"""

import triton
import triton.language as tl

TILE_TOKENS = tl.constexpr(64)
SUBTILES = tl.constexpr(4)


@triton.jit
def int8_dot(a, b, INT8: tl.constexpr):
    """Multiply int8 matrices exactly, int32 result.

    Without an int8 instruction (sm_75) through fp16: products of int8 are exact there,
    and so are sums below 2^24.
    """
    if INT8:
        out = tl.dot(a, b, out_dtype=tl.int32)
    else:
        out = tl.dot(a.to(tl.float16), b.to(tl.float16)).to(tl.int32)
    return out


@triton.jit
def subtile_offsets(
    block_table, head_offset, tile, limit, block_stride, T: tl.constexpr
):
    """Return where the tile's 16-token subtiles are.

    Subtiles from position `limit` on are looked for in block 0, which is readable:
    their tokens are hidden later.

    Returns:
        Offsets of their blocks' tiles `[4]` int64, and their first tokens in these
        `[4]` int32.

    """
    position = tl.arange(0, SUBTILES) * 16 + tile * TILE_TOKENS
    index = position // T.block_size
    block = tl.load(block_table + index, mask=position < limit, other=0)
    return block.to(tl.int64) * block_stride + head_offset, position % T.block_size


@triton.jit
def load_keys(cache, at, token, T: tl.constexpr):
    """Return the bytes of the keys `[128, D]` int8, as they lie in the cache."""
    D: tl.constexpr = T.head_dim
    inner = tl.arange(0, 16)[:, None] * D + tl.arange(0, D)[None, :]
    place = (at + token * D)[:, None, None] + inner[None, :, :]
    return tl.reshape(tl.load(cache + place), (TILE_TOKENS, D))


@triton.jit
def _load_plane(cache, at, token, offset, row, ROWS: tl.constexpr):
    """Return rows `row` of a plane with `ROWS` rows, `[len(row), tokens]` int8."""
    base = at + offset + token * ROWS
    lane = tl.arange(0, 16)
    place = base[None, :, None] + row[:, None, None] * 16 + lane[None, None, :]
    return tl.reshape(tl.load(cache + place), (row.shape[0], TILE_TOKENS))


@triton.jit
def load_scales(cache, at, token, offset):
    """Return the bits of the bf16 scales as fp32 bits, int32."""
    place = (at + offset + 2 * token)[:, None] + 2 * tl.arange(0, 16)[None, :]
    bits = tl.load((cache + place).to(tl.pointer_type(tl.int16)))
    return tl.reshape(bits.to(tl.int32) << 16, (TILE_TOKENS,))


@triton.jit
def key_codes(keys, T: tl.constexpr, A: tl.constexpr):
    """Return int8 codes of 8-bit keys, or codes + 64 of 7-bit keys."""
    if A.inline:
        codes = tl.inline_asm_elementwise(
            A.key_codes, "=r,r", [keys], dtype=tl.int8, is_pure=True, pack=4
        )
    elif T.key_bits == 7:
        codes = keys & 0x7F
    else:
        codes = (keys.to(tl.int32) ^ 0x80).to(tl.int8)
    return codes


@triton.jit
def _levels(codes, T: tl.constexpr):
    """Look codes (int32) up in the codebook."""
    level = tl.full(codes.shape, T.levels[0], tl.int32)
    for i in tl.static_range(len(T.boundaries)):
        level = tl.where(codes > i, T.levels[i + 1], level)
    return level.to(tl.int8)


@triton.jit
def _octet_of_planes(low, high, top, E: tl.constexpr, T: tl.constexpr, A: tl.constexpr):
    """Return levels of 3-bit planes, with 7-bit keys of three planes and the top bits.

    Bits 0 and 1 of the code lie in `low`, bit 2 in `high`, bit 3 in `top`, which is
    laid out like `high`.
    """
    if A.inline:
        # Formats without top bits name two operands only.
        levels = tl.inline_asm_elementwise(
            A.octets[E],
            "=r,r,r,r",
            [low, high, top],
            dtype=tl.int8,
            is_pure=True,
            pack=4,
        )
    else:
        place: tl.constexpr = E // 2 + 4 * (E % 2)
        code = (low.to(tl.int32) >> (E // 2 * 2)) & 3
        code += ((high.to(tl.int32) >> place) & 1) << 2
        if T.key_bits == 7:
            code += ((top.to(tl.int32) >> place) & 1) << 3
        levels = _levels(code, T)
    return levels


@triton.jit
def _octet_of_nibbles(plane, E: tl.constexpr, T: tl.constexpr, A: tl.constexpr):
    """Return levels of 4-bit codes: the lower or the upper nibbles."""
    if A.inline:
        levels = tl.inline_asm_elementwise(
            A.octets[E], "=r,r", [plane], dtype=tl.int8, is_pure=True, pack=4
        )
    else:
        levels = _levels((plane.to(tl.int32) >> (E // 2 % 2 * 4)) & 15, T)
    return levels


@triton.jit
def _top_bits(keys, T: tl.constexpr, A: tl.constexpr, INT8: tl.constexpr):
    """Gather bit 7 of eight neighbouring key bytes; laid out like `high`.

    As a matrix product: byte by byte it would take ten times the instructions, and
    the keys are in the registers of a second operand already. A set bit counts -128,
    the weights are -2^place.
    """
    D: tl.constexpr = T.head_dim
    if A.inline:
        bits = tl.inline_asm_elementwise(
            "and.b32 $0, $1, 0x80808080;",
            "=r,r",
            [keys],
            dtype=tl.int8,
            is_pure=True,
            pack=4,
        )
    else:
        bits = (keys.to(tl.int32) & 0x80).to(tl.int8)
    dim = tl.arange(0, D)[None, :]
    place = (dim % 8 >> 1) + 4 * (dim & 1)
    here = dim // 8 == tl.arange(0, D // 8)[:, None]
    weights = tl.where(here, -(1 << place), 0).to(tl.int8)
    return (int8_dot(weights, tl.trans(bits), INT8) >> 7).to(tl.int8)


@triton.jit
def load_values(
    cache, at, token, keys, T: tl.constexpr, A: tl.constexpr, INT8: tl.constexpr
):
    """Return the packed values of a tile, as `value_octet` takes them apart.

    Tensors `[D/8, tokens]` int8. Row (c, i) of plane part h has the dimensions with
    `dim % 16 // 8 == h` of 64c.. that its bytes hold.
    """
    D: tl.constexpr = T.head_dim
    row = tl.arange(0, D // 8)
    chunk = row // 8
    lane = row % 8
    if T.plane_bits == 3:
        low = chunk * 16 + lane
        packed = (
            _load_plane(cache, at, token, T.values_at, low, D // 4),
            _load_plane(cache, at, token, T.values_at, low + 8, D // 4),
            _load_plane(cache, at, token, T.high_at, row, D // 8),
        )
        if T.key_bits == 7:
            packed = packed + (_top_bits(keys, T, A, INT8),)
        else:
            packed = packed + (packed[2],)
    elif T.plane_bits == 4:
        low = chunk * 32 + lane
        packed = (
            _load_plane(cache, at, token, T.values_at, low, D // 2),
            _load_plane(cache, at, token, T.values_at, low + 8, D // 2),
            _load_plane(cache, at, token, T.values_at, low + 16, D // 2),
            _load_plane(cache, at, token, T.values_at, low + 24, D // 2),
        )
    else:
        packed = ()
        for e in tl.static_range(8):
            at_row = chunk * 64 + 8 * e + lane
            packed = packed + (_load_plane(cache, at, token, T.values_at, at_row, D),)
    return packed


@triton.jit
def value_octet(packed, E: tl.constexpr, T: tl.constexpr, A: tl.constexpr):
    """Return int8 levels of dimensions 64c + 8E + i: `[D/8, tokens]`, rows (c, i)."""
    if T.plane_bits == 3:
        levels = _octet_of_planes(packed[E % 2], packed[2], packed[3], E, T, A)
    elif T.plane_bits == 4:
        # E = 2 * (2 * chunk of 32 + nibble) + part
        levels = _octet_of_nibbles(packed[E // 4 * 2 + E % 2], E, T, A)
    else:
        levels = packed[E]
    return levels

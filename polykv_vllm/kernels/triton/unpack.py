# SPDX-License-Identifier: Apache-2.0
"""Device code from packed tiles to the int8 operands of the matrix products.

A tile of 128 tokens is read 16 bytes at a time. Keys become int8 codes (7-bit keys
stay biased: their bias is one number a query row). A value plane's byte holds several
dimensions of one token; the dimensions are taken apart and joined to `[D, tokens]`.

On a GPU four bytes share a register and `assembly.py` has the few instructions that
handle them together. The plain branch says the same element by element: the
interpreter runs it, and the device check compares the two.
"""

import triton
import triton.language as tl

TILE_TOKENS = tl.constexpr(128)
SUBTILES = tl.constexpr(8)


@triton.jit
def subtile_offsets(
    block_table, head_offset, tile, limit, block_stride, T: tl.constexpr
):
    """Return where the tile's 16-token subtiles are.

    Subtiles from position `limit` on are looked for in block 0, which is readable:
    their tokens are hidden later.

    Returns:
        Offsets of their blocks' tiles `[8]` int64, and their first tokens in these
        `[8]` int32.

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
    """Return rows `row` of a plane with `ROWS` rows, `[len(row), 128]` int8."""
    base = at + offset + token * ROWS
    lane = tl.arange(0, 16)
    place = base[None, :, None] + row[:, None, None] * 16 + lane[None, None, :]
    return tl.reshape(tl.load(cache + place), (row.shape[0], TILE_TOKENS))


@triton.jit
def load_scales(cache, at, token, offset):
    """Return the bits of 128 bf16 scales as fp32 bits, int32."""
    place = (at + offset + 2 * token)[:, None] + 2 * tl.arange(0, 16)[None, :]
    bits = tl.load((cache + place).to(tl.pointer_type(tl.int16)))
    return tl.reshape(bits.to(tl.int32) << 16, (TILE_TOKENS,))


@triton.jit
def key_codes(keys, T: tl.constexpr, A: tl.constexpr):
    """Return int8 codes of 8-bit keys, or codes + 64 of 7-bit keys."""
    if A.inline:
        return tl.inline_asm_elementwise(
            A.key_codes, "=r,r", [keys], dtype=tl.int8, is_pure=True, pack=4
        )
    if T.key_bits == 7:
        return keys & 0x7F
    return (keys.to(tl.int32) ^ 0x80).to(tl.int8)


@triton.jit
def _levels(codes, T: tl.constexpr):
    """Look codes (int32) up in the codebook."""
    level = tl.full(codes.shape, T.levels[0], tl.int32)
    for i in tl.static_range(len(T.boundaries)):
        level = tl.where(codes > i, T.levels[i + 1], level)
    return level.to(tl.int8)


@triton.jit
def _field_of_planes(low, high, top, E: tl.constexpr, T: tl.constexpr, A: tl.constexpr):
    """Return levels of the dimensions 64c + 8E + i, `[D/8, 128]`.

    Bits 0 and 1 of the code lie in `low`, bit 2 in `high`, bit 3 in `top` (only with
    7-bit keys; laid out like `high`).
    """
    if A.inline:
        if T.key_bits == 7:
            return tl.inline_asm_elementwise(
                A.fields[E],
                "=r,r,r,r",
                [low, high, top],
                dtype=tl.int8,
                is_pure=True,
                pack=4,
            )
        return tl.inline_asm_elementwise(
            A.fields[E], "=r,r,r", [low, high], dtype=tl.int8, is_pure=True, pack=4
        )
    place: tl.constexpr = E // 2 + 4 * (E % 2)
    code = (low.to(tl.int32) >> (E // 2 * 2)) & 3
    code += ((high.to(tl.int32) >> place) & 1) << 2
    if T.key_bits == 7:
        code += ((top.to(tl.int32) >> place) & 1) << 3
    return _levels(code, T)


@triton.jit
def _top_bits(keys, T: tl.constexpr):
    """Gather bit 7 of eight neighbouring key bytes; `[D/8, 128]`, laid out like `high`."""
    D: tl.constexpr = T.head_dim
    place = tl.arange(0, 8)[None, None, :]
    shift = (place >> 1) + 4 * (place & 1)
    bits = (tl.reshape(keys, (TILE_TOKENS, D // 8, 8)).to(tl.int32) >> 7) & 1
    return tl.trans(tl.sum(bits << shift, axis=2).to(tl.int8))


@triton.jit
def _plane_values(cache, at, token, keys, T: tl.constexpr, A: tl.constexpr):
    """Take 3-bit planes apart; `[D, 128]`."""
    D: tl.constexpr = T.head_dim
    row = tl.arange(0, D // 8)
    low_row = row // 8 * 16 + row % 8
    low0 = _load_plane(cache, at, token, T.values_at, low_row, D // 4)
    low1 = _load_plane(cache, at, token, T.values_at, low_row + 8, D // 4)
    high = _load_plane(cache, at, token, T.high_at, row, D // 8)
    top = high
    if T.key_bits == 7:
        top = _top_bits(keys, T)
    a = tl.join(
        _field_of_planes(low0, high, top, 0, T, A),
        _field_of_planes(low0, high, top, 4, T, A),
    )
    b = tl.join(
        _field_of_planes(low0, high, top, 2, T, A),
        _field_of_planes(low0, high, top, 6, T, A),
    )
    c = tl.join(
        _field_of_planes(low1, high, top, 1, T, A),
        _field_of_planes(low1, high, top, 5, T, A),
    )
    d = tl.join(
        _field_of_planes(low1, high, top, 3, T, A),
        _field_of_planes(low1, high, top, 7, T, A),
    )
    fields = tl.join(tl.join(a, b), tl.join(c, d))  # field 4u + 2v + w at [..., u, v, w]
    parts = tl.reshape(fields, (D // 64, 8, TILE_TOKENS, 2, 2, 2))
    return tl.reshape(tl.trans(parts, (0, 3, 4, 5, 1, 2)), (D, TILE_TOKENS))


@triton.jit
def _nibble(plane, HALF: tl.constexpr, T: tl.constexpr, A: tl.constexpr):
    if A.inline:
        return tl.inline_asm_elementwise(
            A.fields[HALF], "=r,r", [plane], dtype=tl.int8, is_pure=True, pack=4
        )
    return _levels((plane.to(tl.int32) >> (4 * HALF)) & 15, T)


@triton.jit
def value_levels(cache, at, token, keys, T: tl.constexpr, A: tl.constexpr):
    """Return the tile's values as int8 levels `[D, 128]`; multiply by their scales."""
    D: tl.constexpr = T.head_dim
    if T.plane_bits == 3:
        return _plane_values(cache, at, token, keys, T, A)
    if T.plane_bits == 8:
        return _load_plane(cache, at, token, T.values_at, tl.arange(0, D), D)
    plane = _load_plane(cache, at, token, T.values_at, tl.arange(0, D // 2), D // 2)
    fields = tl.join(_nibble(plane, 0, T, A), _nibble(plane, 1, T, A))
    parts = tl.reshape(fields, (D // 32, 16, TILE_TOKENS, 2))
    return tl.reshape(tl.trans(parts, (0, 3, 1, 2)), (D, TILE_TOKENS))

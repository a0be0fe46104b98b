# SPDX-License-Identifier: Apache-2.0
"""Every bit of a tile has one owner, every byte one token."""

from collections import Counter

import pytest

from polykv_vllm.formats import FORMATS, SUPPORTED_HEAD_DIMS, FormatSpec, TileLayout

SHAPES = [(64, 16), (64, 48), (128, 32)] + [(d, 16) for d in SUPPORTED_HEAD_DIMS]


def places(layout: TileLayout) -> dict[int, list[tuple[int, int]]]:
    """Return {token: [(byte, bit), ...]} for everything that a token stores."""
    spec = layout.spec
    owned: dict[int, list[tuple[int, int]]] = {}
    for token in range(layout.block_size):
        bits = owned.setdefault(token, [])
        for dim in range(layout.head_dim):
            bits += [layout.key_bit(token, dim, b) for b in range(spec.key_bits)]
            bits += [layout.value_bit(token, dim, b) for b in range(spec.value_bits)]
        offsets = [layout.key_scales_offset, layout.value_scales_offset]
        minimums = (layout.key_minimums_offset, layout.value_minimums_offset)
        stored = zip(minimums, spec.minimum_bytes, strict=True)
        offsets += [offset for offset, size in stored if size]
        for offset in offsets:
            first = offset + 2 * token
            bits += [(first + i, bit) for i in range(2) for bit in range(8)]
    return owned


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=lambda f: f.name)
@pytest.mark.parametrize(("head_dim", "block_size"), SHAPES)
def test_every_bit_has_exactly_one_owner(
    fmt: FormatSpec, head_dim: int, block_size: int
) -> None:
    layout = TileLayout(fmt, head_dim, block_size)
    count = Counter(place for bits in places(layout).values() for place in bits)
    everything = {(b, i) for b in range(layout.tile_bytes) for i in range(8)}
    assert set(count) == everything
    assert set(count.values()) == {1}


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=lambda f: f.name)
@pytest.mark.parametrize(("head_dim", "block_size"), SHAPES)
def test_every_byte_belongs_to_one_token(
    fmt: FormatSpec, head_dim: int, block_size: int
) -> None:
    layout = TileLayout(fmt, head_dim, block_size)
    owner: dict[int, int] = {}
    for token, bits in places(layout).items():
        for byte, _ in bits:
            assert owner.setdefault(byte, token) == token
    # Each token owns as many bytes as the engine is told that a slot takes.
    per_token = Counter(owner.values())
    assert set(per_token.values()) == {fmt.slot_bytes(head_dim)}


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=lambda f: f.name)
@pytest.mark.parametrize("head_dim", SUPPORTED_HEAD_DIMS)
@pytest.mark.parametrize("block_size", [16, 32, 48, 128])
def test_sections_follow_each_other(
    fmt: FormatSpec, head_dim: int, block_size: int
) -> None:
    layout = TileLayout(fmt, head_dim, block_size)
    sections = [
        0,
        layout.value_codes_offset,
        layout.key_scales_offset,
        layout.value_scales_offset,
    ]
    assert sections == sorted(set(sections))
    assert layout.key_minimums_offset == layout.value_scales_offset + 2 * block_size
    last = layout.value_minimums_offset + fmt.minimum_bytes[1] * block_size
    assert layout.tile_bytes == last
    # The kernels load whole vectors of codes and 16-bit scales.
    assert layout.value_codes_offset % 64 == 0
    assert layout.key_scales_offset % 2 == 0


def test_key_order_is_the_documented_one() -> None:
    """One load of 64 bytes = 4 dims of 16 tokens: what VNNI, AVX2 and AMX want."""
    layout = TileLayout(FORMATS["polykv_k8v3"], 128, 32)
    assert [layout.key_byte(0, d) for d in range(5)] == [0, 1, 2, 3, 64]
    assert [layout.key_byte(t, 0) for t in (1, 15, 16)] == [4, 60, 16 * 128]


def test_one_load_of_low_bit_keys_is_whole_rows_of_the_key_order() -> None:
    """Byte i of each row that shifts and masks give is byte i of the 8-bit order."""
    whole = TileLayout(FORMATS["polykv_k8v3"], 128, 32)
    for name, rows in (("polykv_k4v4", 2), ("polykv_k2v2", 4), ("polykv_k3v3", 4)):
        layout = TileLayout(FORMATS[name], 128, 32)
        for token, dim in ((0, 0), (5, 77), (17, 127), (31, 64)):
            byte, bit = layout.key_bit(token, dim, 0)
            row, place = divmod(whole.key_byte(token, dim), 64)
            assert (byte // 64 * rows + bit * rows // 8, byte % 64) == (row, place)


def test_seven_bit_keys_carry_the_top_value_bit() -> None:
    layout = TileLayout(FORMATS["polykv_k7v4"], 64, 32)
    for token, dim in ((0, 0), (17, 63), (31, 5)):
        assert layout.value_bit(token, dim, 3) == (layout.key_byte(token, dim), 7)


@pytest.mark.parametrize("block_size", [0, -16, 8, 24, 100])
def test_bad_block_size_is_named(block_size: int) -> None:
    with pytest.raises(ValueError, match=f"block size {block_size} .*multiple of 16"):
        TileLayout(FORMATS["polykv_k8v3"], 64, block_size)


def test_bad_head_dim_is_named() -> None:
    with pytest.raises(ValueError, match=r"head size 48.*64, 80, 96, 112, 128"):
        TileLayout(FORMATS["polykv_k8v3"], 48, 32)

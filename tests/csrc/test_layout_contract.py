# SPDX-License-Identifier: Apache-2.0
"""The constants that C++ repeats equal those of `formats/`."""

import ctypes as ct

import pytest

from polykv_vllm.formats import CODEBOOKS, FORMATS, SUPPORTED_HEAD_DIMS, TileLayout
from polykv_vllm.ops._structs import Format
from polykv_vllm.ops.cpu import load_library


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=lambda f: f.name)
@pytest.mark.parametrize("head_dim", SUPPORTED_HEAD_DIMS)
@pytest.mark.parametrize("block_size", [16, 32, 48, 128])
def test_offsets_are_equal(fmt, head_dim: int, block_size: int) -> None:
    out = (ct.c_int64 * 8)()
    load_library().polykv_tile_layout(
        ct.byref(Format.of(fmt, head_dim)),
        ct.c_int64(head_dim),
        ct.c_int64(block_size),
        out,
    )
    layout = TileLayout(fmt, head_dim, block_size)
    assert list(out) == [
        layout.value_codes_offset,
        layout.value_high_plane_offset,
        layout.key_scales_offset,
        layout.value_scales_offset,
        layout.tile_bytes,
        layout.key_high_plane_offset,
        layout.key_minimums_offset,
        layout.value_minimums_offset,
    ]


def test_head_dims_are_equal() -> None:
    out = (ct.c_int32 * 64)()
    count = load_library().polykv_head_dims(out)
    assert tuple(out[:count]) == SUPPORTED_HEAD_DIMS


@pytest.mark.parametrize("bits", CODEBOOKS)
def test_codebooks_are_equal(bits: int) -> None:
    levels = (ct.c_int8 * 16)()
    boundaries = (ct.c_float * 16)()
    count = load_library().polykv_codebook(bits, levels, boundaries)
    book = CODEBOOKS[bits]
    assert tuple(levels[:count]) == book.levels
    # Both round the fp64 value to fp32 once.
    singles = [ct.c_float(x).value for x in book.boundaries]
    assert list(boundaries[: count - 1]) == singles


def test_there_are_no_other_codebooks() -> None:
    levels, boundaries = (ct.c_int8 * 256)(), (ct.c_float * 256)()
    for bits in (1, 5, 8):
        assert load_library().polykv_codebook(bits, levels, boundaries) == 0

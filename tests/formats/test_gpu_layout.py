# SPDX-License-Identifier: Apache-2.0
"""The GPU's order holds the same bytes as the CPU's, each token's its own."""

import pytest

from polykv_vllm.formats import FORMATS, SUPPORTED_HEAD_DIMS, FormatSpec, TileLayout
from polykv_vllm.formats.gpu_layout import (
    GPU_LAYOUT_ID,
    GpuTileLayout,
    byte_permutation,
)
from polykv_vllm.formats.layout import LAYOUT_ID

BYTE_KEYS = [fmt for fmt in FORMATS.values() if not fmt.is_low_bit]
NAMED = pytest.mark.parametrize("fmt", BYTE_KEYS, ids=lambda f: f.name)
HEAD_DIMS = [dim for dim in SUPPORTED_HEAD_DIMS if dim in (64, 128, 256)]


def test_the_orders_have_different_names() -> None:
    assert GPU_LAYOUT_ID != LAYOUT_ID


def test_low_bit_formats_have_none() -> None:
    with pytest.raises(ValueError, match="polykv_k2v2 has no order for GPUs"):
        GpuTileLayout(FORMATS["polykv_k2v2"], 64, 32)


@NAMED
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("block_size", [16, 48])
def test_every_bit_moves_with_its_byte(
    fmt: FormatSpec, head_dim: int, block_size: int
) -> None:
    """One permutation of bytes serves keys and values, and is one to one."""
    cpu = TileLayout(fmt, head_dim, block_size)
    gpu = GpuTileLayout(fmt, head_dim, block_size)
    order = byte_permutation(cpu, gpu)
    assert sorted(order) == list(range(cpu.tile_bytes))
    for token in range(block_size):
        for dim in range(head_dim):
            assert order[gpu.key_byte(token, dim)] == cpu.key_byte(token, dim)
            for bit in range(fmt.value_bits):
                place, number = gpu.value_bit(token, dim, bit)
                assert (order[place], number) == cpu.value_bit(token, dim, bit)


@NAMED
def test_there_and_back_is_nothing(fmt: FormatSpec) -> None:
    cpu, gpu = TileLayout(fmt, 64, 32), GpuTileLayout(fmt, 64, 32)
    there, back = byte_permutation(cpu, gpu), byte_permutation(gpu, cpu)
    assert [there[i] for i in back] == list(range(cpu.tile_bytes))


@NAMED
def test_no_byte_belongs_to_two_tokens(fmt: FormatSpec) -> None:
    layout = GpuTileLayout(fmt, 64, 32)
    owner: dict[int, int] = {}
    for token in range(32):
        for dim in range(64):
            places = [layout.value_bit(token, dim, b)[0] for b in range(fmt.value_bits)]
            for place in (layout.key_byte(token, dim), *places):
                assert owner.setdefault(place, token) == token


def test_a_key_is_one_row_of_bytes() -> None:
    layout = GpuTileLayout(FORMATS["polykv_k8v3"], 128, 32)
    row = sorted(layout.key_byte(5, dim) for dim in range(128))
    assert row == list(range(5 * 128, 6 * 128))
    # Eight neighbours hold the dimensions that share a byte of the high plane.
    assert [layout.key_byte(0, 64 + 8 * j + 3) for j in range(8)] == [
        64 + 3 * 8 + j for j in range(8)
    ]


def test_different_tiles_have_no_permutation() -> None:
    fmt = FORMATS["polykv_k8v3"]
    with pytest.raises(ValueError, match="different contents"):
        byte_permutation(TileLayout(fmt, 64, 16), GpuTileLayout(fmt, 64, 32))

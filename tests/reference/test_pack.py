# SPDX-License-Identifier: Apache-2.0
"""Codes survive the tile; writing a token leaves every other token's bits alone."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from polykv_vllm.formats import CODEBOOKS, FORMATS, FormatSpec, TileLayout
from polykv_vllm.reference.lowbit import Quantized
from polykv_vllm.reference.pack import pack_token, unpack_tile
from tests.formats.test_layout import places

FORMAT_LIST = list(FORMATS.values())


def random_codes(fmt: FormatSpec, head_dim: int) -> tuple[Quantized, Quantized]:
    """Return a token whose codes cover their whole range."""
    rows = []
    for quantizer, bits, minimum_bytes in zip(
        # Keys of a codebook come as levels.
        (fmt.key_quantizer, fmt.value_quantizer),
        (fmt.key_bits, fmt.value_bits),
        fmt.minimum_bytes,
        strict=True,
    ):
        largest = (1 << (bits - 1)) - 1
        low, high = (
            (-largest, largest + 1) if quantizer == "symmetric" else (0, 1 << bits)
        )
        scales = torch.randn(2).to(torch.bfloat16)
        codes = torch.randint(low, high, (head_dim,)).int()
        if quantizer == "codebook" and not rows:
            codes = torch.tensor(CODEBOOKS[bits].levels, dtype=torch.int32)[codes]
        rows.append(Quantized(codes, scales[0], scales[1] if minimum_bytes else None))
    return rows[0], rows[1]


@pytest.mark.parametrize("fmt", FORMAT_LIST, ids=lambda f: f.name)
@pytest.mark.parametrize(("head_dim", "block_size"), [(64, 48), (128, 32), (256, 16)])
def test_pack_then_unpack(fmt: FormatSpec, head_dim: int, block_size: int) -> None:
    size = TileLayout(fmt, head_dim, block_size).tile_bytes
    tile = torch.randint(0, 256, (size,), dtype=torch.uint8)
    tokens = [random_codes(fmt, head_dim) for _ in range(block_size)]
    for token in torch.randperm(block_size).tolist():
        pack_token(tile, token, *tokens[token], fmt)
    unpacked = unpack_tile(tile, head_dim, fmt)
    for part, got in enumerate(unpacked):
        assert torch.equal(got.codes, torch.stack([t[part].codes for t in tokens]))
        assert torch.equal(got.scale, torch.stack([t[part].scale for t in tokens]))
        assert (got.minimum is None) == (tokens[0][part].minimum is None)
        if got.minimum is not None:
            minimums = torch.stack([t[part].minimum for t in tokens])
            assert torch.equal(got.minimum, minimums)


@given(st.sampled_from(FORMAT_LIST), st.integers(0, 31), st.integers(0, 2**16))
def test_append_touches_its_own_bytes_only(
    fmt: FormatSpec, token: int, seed: int
) -> None:
    torch.manual_seed(seed)
    layout = TileLayout(fmt, 64, 32)
    before = torch.randint(0, 256, (layout.tile_bytes,), dtype=torch.uint8)
    after = before.clone()
    pack_token(after, token, *random_codes(fmt, 64), fmt)
    own = torch.zeros(layout.tile_bytes, dtype=torch.bool)
    own[[byte for byte, _ in places(layout)[token]]] = True
    assert torch.equal(after[~own], before[~own])
    assert not torch.equal(after[own], before[own])

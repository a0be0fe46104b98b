# SPDX-License-Identifier: Apache-2.0
"""Today's code writes the bytes that were frozen for each format version.

A failure means that caches written by another release are read wrongly. If the bytes
were to change, raise the format's `version` and run `tests/golden/regenerate.py`.
"""

import pytest
import torch

from polykv_vllm import ops
from polykv_vllm.formats import FORMATS, FormatSpec
from polykv_vllm.reference.pack import unpack_tile
from polykv_vllm.reference.quantize import quantize_key, quantize_value
from tests.golden.regenerate import HEAD_DIM, path, rows, tile

NAMED = pytest.mark.parametrize("fmt", FORMATS.values(), ids=lambda f: f.name)


@pytest.mark.parametrize("isa", ops.available_isas())
@NAMED
def test_bytes_are_the_frozen_ones(fmt: FormatSpec, isa: str) -> None:
    assert tile(fmt, isa) == path(fmt).read_bytes()


@NAMED
def test_frozen_bytes_unpack_to_the_codes(fmt: FormatSpec) -> None:
    frozen = torch.frombuffer(bytearray(path(fmt).read_bytes()), dtype=torch.uint8)
    key, value = unpack_tile(frozen, HEAD_DIM, fmt)
    for got, expected in (
        (key, quantize_key(rows(1)[:, 0], fmt)),
        (value, quantize_value(rows(2)[:, 0], fmt)),
    ):
        assert torch.equal(got.codes, expected.codes)
        assert torch.equal(got.scale, expected.scale)

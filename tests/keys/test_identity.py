# SPDX-License-Identifier: Apache-2.0
"""Bytes of another meaning have another identity."""

from dataclasses import replace

import pytest
import torch

from polykv_vllm import ops
from polykv_vllm.formats import FORMATS, get_format
from polykv_vllm.keys import TREATMENTS, KeyTransform, format_identity

FMT = get_format("polykv_k8v3")
SCALES = torch.rand(2, 64) + 0.5


def transforms() -> list[KeyTransform]:
    changed = SCALES.clone()
    changed[1, 63] *= 1 + 2**-22
    assert not torch.equal(changed, SCALES)
    scales = (SCALES, changed, SCALES.flip(0), SCALES.view(1, 128), None)
    return [KeyTransform(s, rotate) for s in scales for rotate in (False, True)]


def test_each_part_counts() -> None:
    found = {format_identity(fmt, 64, 32, KeyTransform()) for fmt in FORMATS.values()}
    found |= {format_identity(FMT, 64, 32, transform) for transform in transforms()}
    found.add(format_identity(replace(FMT, version=2), 64, 32, KeyTransform()))
    found.add(format_identity(FMT, 128, 32, KeyTransform()))
    found.add(format_identity(FMT, 64, 64, KeyTransform()))
    found.add(format_identity(FMT, 64, 32, KeyTransform(), "a" * 64))
    found.add(format_identity(FMT, 64, 32, KeyTransform(), "b" * 64))
    centred = [KeyTransform(rotate=True, centers=c) for c in (SCALES, SCALES + 1)]
    found |= {format_identity(FMT, 64, 32, transform) for transform in centred}
    # The untreated k8v3 is in both sets.
    assert len(found) == len(FORMATS) + len(transforms()) - 1 + 7


def test_the_kernels_order_of_bytes_counts() -> None:
    """Bytes that a GPU, or the interpreter, has stored are not read on a CPU."""
    found = {
        isa: format_identity(FMT, 64, 32, KeyTransform(), layout_id=ops.layout_id(isa))
        for isa in ("scalar", "avx2", "reference", "triton")
    }
    cpu = format_identity(FMT, 64, 32, KeyTransform())
    assert {isa for isa, identity in found.items() if identity != cpu} == {"triton"}
    assert "gpu_row_v1" in found["triton"] and "cpu_quad_v1" in cpu


@pytest.mark.parametrize("treatment", TREATMENTS)
def test_equal_scales_have_one_identity(treatment: str) -> None:
    def transform(scales: torch.Tensor) -> KeyTransform:
        return KeyTransform(
            scales if "scale" in treatment else None, "hadamard" in treatment
        )

    strided = torch.stack((SCALES, SCALES), -1)[..., 0]
    got = format_identity(FMT, 64, 32, transform(strided))
    assert got == format_identity(FMT, 64, 32, transform(SCALES.clone()))
    assert f"keys={treatment}" in got


def test_golden() -> None:
    """A stored pool outlives the process: the text must not change by itself."""
    scales = torch.arange(1, 129, dtype=torch.float32).view(2, 64)
    got = format_identity(FMT, 64, 32, KeyTransform(scales, True))
    assert got == (
        "polykv_k8v3-1 cpu_quad_v1 head_dim=64 block_size=32 "
        "keys=channel_scale_hadamard:9f94d5d3b806b4135bd1f0a30295f052"
    )

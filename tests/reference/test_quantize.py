# SPDX-License-Identifier: Apache-2.0
"""Error bounds of the codec, derived; the oracle itself is under test here."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from polykv_vllm.formats import (
    CODEBOOKS,
    FORMATS,
    SUPPORTED_HEAD_DIMS,
    FormatSpec,
    clip_place,
)
from polykv_vllm.reference.quantize import (
    bf16_round_up,
    dequantize_key,
    dequantize_value,
    quantize_affine,
    quantize_key,
    quantize_rotated,
    quantize_symmetric,
    quantize_value,
)
from polykv_vllm.reference.rotation import rotate
from tests.row_strategies import rows

ROTATED = [f for f in FORMATS.values() if f.value_quantizer == "codebook"]
LOW_BIT = [f for f in FORMATS.values() if f.is_low_bit]
DIMS = st.sampled_from(SUPPORTED_HEAD_DIMS)

# Spacing of bf16 below its normal range, and the largest relative step above it.
BF16_SUBNORMAL, BF16_EPS = 2.0**-133, 2.0**-7


@given(st.floats(0, 2.0**127, width=32))
def test_bf16_round_up(x: float) -> None:
    rounded = bf16_round_up(torch.tensor(x)).double().item()
    x = torch.tensor(x).double().item()
    assert x <= rounded <= x * (1 + BF16_EPS) + BF16_SUBNORMAL


@given(DIMS.flatmap(rows), st.sampled_from([63, 127]))
def test_symmetric_error_is_half_a_step(row: torch.Tensor, max_code: int) -> None:
    """|x - code * scale| <= scale / 2, and scale is one bf16 step above max / 127."""
    codes, scale, _ = quantize_symmetric(row, max_code)
    assert codes.abs().max() <= max_code
    step, largest = scale.double(), row.double().abs().max()
    assert step <= (largest / max_code) * (1 + BF16_EPS) * (1 + 2**-23) + BF16_SUBNORMAL
    error = (codes.double() * step - row.double()).abs().max()
    # The quotient is rounded to fp32 before it becomes an integer: up to 2^-24 of 127.
    slack = max_code * 2.0**-24
    # A scale of zero means that max/127 rounded to zero in fp32: max < 127 * 2^-149.
    floor = max_code * 2.0**-149 if step == 0 else 0.0
    assert error <= step * (0.5 + slack) + floor


@given(DIMS.flatmap(rows), st.sampled_from([63, 127]))
def test_symmetric_uses_its_range(row: torch.Tensor, max_code: int) -> None:
    codes, scale, _ = quantize_symmetric(row, max_code)
    if scale > 2.0**-126:
        # Rounding the scale up by one bf16 step costs at most 1/129 of the codes.
        assert codes.abs().max() >= max_code * (1 - BF16_EPS) - 0.5


@given(DIMS.flatmap(rows), st.sampled_from([3, 4]))
def test_rotated_rows_keep_norm_and_direction(row: torch.Tensor, bits: int) -> None:
    """The scale makes |v'| = |v|; levels have the sign of what they code.

    Hence v.v' >= 0 and |v - v'|^2 = |v|^2 + |v'|^2 - 2 v.v' <= 2 |v|^2, for every
    row; bf16 rounding of the scale changes |v'| by 2^-8, fp32 by a few 2^-24.
    """
    fmt = FORMATS[f"polykv_k8v{bits}"]
    codes, scale, _ = quantize_rotated(row, bits)
    assert scale.isfinite()
    assert codes.min() >= 0 and codes.max() < 2**bits
    norm = row.double().norm().item()
    if row.abs().max() < 2.0**-125:
        assert scale == 0
        return
    levels = torch.tensor(CODEBOOKS[bits].levels, dtype=torch.float64)[codes.long()]
    coded_norm = (levels.norm() * scale.double()).item()
    assert coded_norm == pytest.approx(norm, rel=2**-8 + 2**-18)
    # In units of the row, so that fp32 holds it whatever the norm.
    unit = (row.double() / norm).float()
    relative = torch.tensor(coded_norm / norm / levels.norm().item())
    restored = dequantize_value(quantize_value(unit, fmt)._replace(scale=relative), fmt)
    assert (restored - unit).norm() <= 2**0.5 * (1 + 2**-7)


def sphere_error(head_dim: int, bits: int) -> float:
    """E |v - v'|^2 / |v|^2 for v of random direction, by numerical integration.

    A coordinate of a row on the sphere of radius sqrt(D) has the density
    (1 - x^2/D)^((D - 3)/2), up to a factor; with |v'| = |v| the error is
    2 - 2 cos(v, v') = 2 - 2 E[X Q(X)] / sqrt(E[Q(X)^2]). For large D this tends to
    N(0, 1) and, with the distortion d of the codebook, to 2 - 2 sqrt(1 - d).
    """
    book = CODEBOOKS[bits]
    x = torch.linspace(-(head_dim**0.5), head_dim**0.5, 400_001, dtype=torch.float64)
    density = (1 - x * x / head_dim).clamp(min=0) ** ((head_dim - 3) / 2)
    density /= density.sum()
    boundaries = torch.tensor(book.boundaries, dtype=torch.float64)
    q = torch.tensor(book.centroids, dtype=torch.float64)[
        torch.bucketize(x, boundaries)
    ]
    cosine = (density * x * q).sum() / (density * q * q).sum().sqrt()
    return (2 - 2 * cosine).item()


@pytest.mark.parametrize(("bits", "distortion"), [(3, 0.034549), (4, 0.009516)])
def test_sphere_error_tends_to_lloyd_max(bits: int, distortion: float) -> None:
    expected = 2 - 2 * (1 - distortion) ** 0.5
    assert sphere_error(1 << 14, bits) == pytest.approx(expected, rel=2e-3)


@pytest.mark.parametrize("fmt", ROTATED, ids=lambda f: f.name)
@pytest.mark.parametrize("head_dim", SUPPORTED_HEAD_DIMS)
def test_rotated_error_is_the_expected_one(fmt: FormatSpec, head_dim: int) -> None:
    """Case 1: the mean over 4096 random rows, within 1 % of its own spread.

    `sphere_error` takes the mean of |Q(v)|; that norm varies from row to row by
    O(1/sqrt(D)) relative, which enters squared: 2/D.
    """
    v = torch.randn(4096, head_dim)
    error = dequantize_value(quantize_value(v, fmt), fmt) - v
    relative = (error.square().sum(-1) / v.square().sum(-1)).mean().item()
    expected = sphere_error(head_dim, fmt.value_bits)
    assert relative == pytest.approx(expected, rel=0.01 + 2 / head_dim)


@pytest.mark.parametrize("fmt", ROTATED, ids=lambda f: f.name)
def test_one_hot_is_nearly_exact(fmt: FormatSpec) -> None:
    """Its rotation has one magnitude, so one level codes it: only bf16 rounding."""
    row = torch.zeros(128)
    row[77] = -3.7
    restored = dequantize_value(quantize_value(row, fmt), fmt)
    assert (restored - row).abs().max() <= 3.7 * (2**-8 + 2**-20)


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=lambda f: f.name)
def test_zeros_stay_exact_zeros(fmt: FormatSpec) -> None:
    """Case 3."""
    zeros = torch.zeros(2, 64)
    assert torch.equal(dequantize_key(quantize_key(zeros, fmt)), zeros)
    assert torch.equal(dequantize_value(quantize_value(zeros, fmt), fmt), zeros)


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=lambda f: f.name)
@pytest.mark.parametrize("head_dim", SUPPORTED_HEAD_DIMS)
def test_power_of_two_scales_the_scale_alone(fmt: FormatSpec, head_dim: int) -> None:
    row = torch.randn(head_dim)
    for quantize in (quantize_key, quantize_value):
        base = quantize(row, fmt)
        for exponent in (-60, -3, 5, 60):
            scaled = quantize(row * 2.0**exponent, fmt)
            assert torch.equal(scaled.codes, base.codes)
            assert scaled.scale == base.scale * 2.0**exponent


def test_published_codes() -> None:
    """The worked example of the published 3-bit value path, head_dim 8."""
    v = torch.tensor([0.5, -1.25, 3, 0, -0.75, 2.25, -4, 1])
    assert quantize_rotated(v, 3).codes.tolist() == [4, 2, 4, 4, 5, 7, 1, 2]


def test_key_bias_of_qwen_keeps_the_top_key() -> None:
    """Case 7: two channels biased by 600-900 leave 8-bit keys' ranking intact.

    The step is 900/127 = 7, so a score's error is about 7/sqrt(12) * |q|; a query
    that agrees with one key by more than 10 of these must still find it.
    """
    fmt = FORMATS["polykv_k8v3"]
    key = torch.randn(256, 128)
    key[:, 5] += 900
    key[:, 70] -= 600
    target = torch.arange(0, 256, 16)
    centred = key - key.mean(0)
    query = centred[target] / centred[target].norm(dim=-1, keepdim=True)
    query[:, [5, 70]] = 0
    sigma = 900 / 127 / 12**0.5
    key[target] += 20 * sigma * query
    found = (query @ dequantize_key(quantize_key(key, fmt)).T).argmax(-1)
    assert torch.equal(found, (query @ key.T).argmax(-1))


@pytest.mark.parametrize("fmt", LOW_BIT, ids=lambda f: f.name)
def test_one_hot_key_without_and_with_a_rotation(fmt: FormatSpec) -> None:
    """Case 10: what codes of few bits make of a spike.

    Keys are not stored as they come.

    As it comes, it goes beyond a codebook's largest level, and the zeros around it
    become the smallest ones. Rotated, all of its elements have one magnitude: with the
    norm kept, one level codes them to within the rounding of a bf16 scale, where a
    scale from the RMS alone puts them on a 2-bit threshold.
    """
    row = torch.zeros(128)
    row[77] = -3.7
    plain = dequantize_key(quantize_key(row, fmt))
    is_codebook = fmt.key_quantizer == "codebook"
    assert ((plain - row).norm() > 0.5 * row.norm()) == is_codebook
    turned = rotate(dequantize_key(quantize_key(rotate(row), fmt)))
    assert (turned - row).abs().max() <= 3.7 * 2**-7


@given(DIMS.flatmap(rows), st.sampled_from([2, 3, 4]), st.sampled_from([0.0, 0.96]))
def test_affine_error_is_half_a_step_beside_what_is_clipped(
    row: torch.Tensor, bits: int, clip: float
) -> None:
    """Also of the largest rows, and zero for rows that bf16 has no step for."""
    codes, scale, minimum = quantize_affine(row, bits, clip)
    assert minimum is not None
    assert codes.min() >= 0 and codes.max() < 2**bits
    bound = row.abs().sort().values[clip_place(clip, row.shape[-1])]
    clipped = row.clamp(-bound, bound).double()
    error = (codes.double() * scale.double() + minimum.double() - clipped).abs().max()
    # bf16 rounds the two ends of the range, and the step times 2^bits - 1.
    rounding = 2**-7 * clipped.abs().max() + 2**bits * BF16_SUBNORMAL
    assert error <= scale.double() / 2 + rounding


def test_published_affine_codes() -> None:
    """The worked example of the published 2-bit quantizer, head_dim 8, clip 0.5.

    0 lies half way between two levels and goes up.
    """
    v = torch.tensor([0.5, -1.25, 3, 0, -0.75, 2.25, -4, 1])
    quantized = quantize_affine(v, 2, 0.5)
    low, high = 0.41666667, 1.25
    expected = torch.tensor([low, -high, high, low, -low, high, -high, high])
    torch.testing.assert_close(dequantize_key(quantized), expected, rtol=0, atol=2**-7)

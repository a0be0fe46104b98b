# SPDX-License-Identifier: Apache-2.0
"""Low-bit quantizers: published vectors, theory for N(0, 1), and rows that break."""

import pytest
import torch

from polykv_vllm.reference.lowbit import (
    ALPHA,
    BITS,
    QUANTIZERS,
    Affine,
    Quantizer,
    Quest,
    quantizer,
)

ROW = torch.tensor([0.5, -1.25, 3, 0, -0.75, 2.25, -4, 1])
GAUSSIAN_ERROR = {1: 0.36338, 2: 0.118846, 3: 0.037440, 4: 0.011543}


def both(bits: int) -> list[Quantizer]:
    return [quantizer(name, bits, "key") for name in QUANTIZERS]


def restored(codec: Quantizer, rows: torch.Tensor) -> torch.Tensor:
    return codec.dequantize(codec.quantize(rows))


def test_quest_is_the_published_one() -> None:
    codec = Quest(2, torch.float32)
    found = codec.quantize(ROW)
    assert found.scale.item() == pytest.approx(2.03561640, rel=1e-7)
    assert (found.codes - 2).tolist() == [0, -1, 1, 0, -1, 1, -2, 0]
    expected = [1.017808, -1.017808, 3.053425, 1.017808]
    expected += [-1.017808, 3.053425, -3.053425, 1.017808]
    torch.testing.assert_close(codec.dequantize(found), torch.tensor(expected))


def test_affine_is_the_published_one() -> None:
    """0 lies in the middle of two levels: ties go up."""
    found = restored(Affine(2, 0.5, torch.float32), ROW)
    expected = [0.416667, -1.25, 1.25, 0.416667, -0.416667, 1.25, -1.25, 1.25]
    torch.testing.assert_close(found, torch.tensor(expected), rtol=0, atol=1e-6)


@pytest.mark.parametrize("bits", GAUSSIAN_ERROR)
def test_quest_errs_as_theory_says(bits: int) -> None:
    rows = torch.randn(4000, 128, generator=torch.Generator().manual_seed(bits))
    error = (restored(Quest(bits), rows) - rows).square().mean()
    # Rows of 128 have a norm of their own, which is nearer than the distribution's.
    assert float(error) == pytest.approx(GAUSSIAN_ERROR[bits], rel=0.04)


def test_the_table_of_alpha_is_optimal() -> None:
    """Half the span of the evenly spaced levels of least error for N(0, 1)."""
    grid = torch.linspace(-8, 8, 200_001, dtype=torch.float64)
    weight = torch.exp(-grid.square() / 2)

    def error(bits: int, alpha: float) -> float:
        step = 2 * alpha / ((1 << bits) - 1)
        half = 1 << (bits - 1)
        levels = step * ((grid / step).floor().clamp(-half, half - 1) + 0.5)
        return float((weight * (levels - grid).square()).sum() / weight.sum())

    for bits in (2, 3, 4):
        best = error(bits, ALPHA[bits])
        assert best == pytest.approx(GAUSSIAN_ERROR[bits], rel=1e-3)
        assert best <= min(error(bits, ALPHA[bits] * f) for f in (0.99, 1.01))


def test_clips_follow_the_bits() -> None:
    rows = torch.randn(2000, 128, generator=torch.Generator().manual_seed(0))
    rows[:, 0] *= 8

    def error(codec: Quantizer) -> float:
        return float((restored(codec, rows)[:, 1:] - rows[:, 1:]).square().mean())

    for bits in (2, 3):
        assert error(quantizer("affine", bits, "key")) < error(Affine(bits)) / 2
    assert quantizer("affine", 4, "key") == Affine(4)
    assert quantizer("affine", 2, "value") == Affine(2, 0.92)


@pytest.mark.parametrize("bits", BITS)
def test_a_row_depends_on_no_other_and_codes_fit(bits: int) -> None:
    rows = torch.randn(5, 3, 64, generator=torch.Generator().manual_seed(1))
    for codec in both(bits):
        found = codec.quantize(rows)
        assert found.codes.min() >= 0 and found.codes.max() < 1 << bits
        assert found.scale.dtype == torch.bfloat16
        alone = codec.quantize(rows[2, 1])
        assert torch.equal(found.codes[2, 1], alone.codes)
        assert found.scale[2, 1] == alone.scale


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("norm", [1e-30, 1e-4, 1.0, 1e5, 1e30])
def test_the_norm_of_a_row_does_not_matter(bits: int, norm: float) -> None:
    rows = torch.randn(50, 64, generator=torch.Generator().manual_seed(2))
    for codec in both(bits):
        unit = (restored(codec, rows) - rows).square().sum(-1)
        # A power of two changes no rounding.
        power = 2.0 ** round(float(torch.log2(torch.tensor(norm))))
        scaled = (restored(codec, rows * power) / power - rows).square().sum(-1)
        torch.testing.assert_close(scaled, unit)


@pytest.mark.parametrize("bits", BITS)
def test_rows_that_break_others(bits: int) -> None:
    largest = torch.finfo(torch.bfloat16).max
    one_hot = torch.zeros(64)
    one_hot[7] = 3.0
    signs = torch.ones(64)
    signs[::2] = -1
    for codec in both(bits):
        assert torch.equal(restored(codec, torch.zeros(64)), torch.zeros(64))
        for row in (one_hot, signs * largest, torch.full((64,), -2.5)):
            found = restored(codec, row)
            assert found.isfinite().all()
            error = (found.double() - row.double()).norm() / row.double().norm()
            assert error <= 1.0
        flat = restored(codec, torch.full((64,), -2.5))
        assert (flat + 2.5).abs().max() < 2.5
        mixed = torch.stack([torch.full((64,), torch.nan), one_hot])
        torch.testing.assert_close(restored(codec, mixed)[1], restored(codec, one_hot))
    exact = restored(Affine(bits), torch.full((64,), -2.5))
    assert torch.equal(exact, torch.full((64,), -2.5))


def test_a_one_hot_row_is_why_transforms_exist() -> None:
    """Case 10: Hadamard puts every element of it on QuEST's threshold at two bits."""
    from polykv_vllm.reference.rotation import rotate

    row = torch.zeros(1, 128)
    row[0, 5] = 1.0
    turned = rotate(row)
    error = (restored(Quest(2), turned) - turned).square().sum()
    assert float(error) > 0.2  # a Gaussian row: 0.119


def test_errors_name_what_exists() -> None:
    with pytest.raises(ValueError, match="quest, affine"):
        quantizer("int4", 4, "key")
    with pytest.raises(ValueError, match="no minimum"):
        Affine(2).dequantize(Quest(2).quantize(ROW))

# SPDX-License-Identifier: Apache-2.0
"""Properties of the transforms: what the theory promises, at every head size."""

import pytest
import torch

from polykv_vllm.calibrate import transforms
from polykv_vllm.calibrate.transforms import hadamard, inverse, wush
from polykv_vllm.formats import power_blocks

SIZES = [2, 8, 64, 80, 96, 112, 128, 192]


def gram(size: int, seed: int, samples: int = 4) -> torch.Tensor:
    """A second moment `[2, size, size]` with directions of very different energy."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(
        2, samples * size, size, generator=generator, dtype=torch.float64
    )
    rows = rows * torch.logspace(0, 1.5, size, dtype=torch.float64)
    rows = (
        rows @ torch.linalg.qr(torch.randn(size, size, generator=generator).double())[0]
    )
    return rows.mT @ rows


def root(matrix: torch.Tensor) -> torch.Tensor:
    values, vectors = torch.linalg.eigh(matrix)
    return vectors @ torch.diag_embed(values.sqrt()) @ vectors.mT


def closeness(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


def test_the_published_vector() -> None:
    """Signs and order of the eigenvectors are free; T^T T is not."""
    t = wush(torch.tensor([[4.0, 0], [0, 1]]), torch.tensor([[1.0, 0], [0, 9]]), 0.0)
    assert closeness(t.mT @ t, torch.tensor([[0.5, 0], [0, 3]]).double()) < 1e-12
    assert closeness(t.abs(), torch.tensor([[0.5, 1.5**0.5]] * 2)) < 1e-6


@pytest.mark.parametrize("size", SIZES)
def test_energy_and_sensitivity_are_balanced(size: int) -> None:
    data, sensitivity = gram(size, 1), gram(size, 2)
    t = wush(data, sensitivity, 0.0)
    back = inverse(t)
    eye = torch.eye(size, dtype=torch.float64).expand_as(t)
    assert closeness(t @ back, eye) < 1e-9
    energy, error = t @ data @ t.mT, back.mT @ sensitivity @ back
    gain = error.diagonal(dim1=-2, dim2=-1).sum(-1) / energy.diagonal(
        dim1=-2, dim2=-1
    ).sum(-1)
    assert closeness(error, energy * gain[:, None, None]) < 1e-9
    # Of each head: the transformed data have the energy that they had.
    trace = [m.diagonal(dim1=-2, dim2=-1).sum(-1) for m in (energy, data)]
    torch.testing.assert_close(*trace)
    begin = 0
    for block in power_blocks(size):
        diagonal = energy.diagonal(dim1=-2, dim2=-1)[:, begin : begin + block]
        torch.testing.assert_close(diagonal, diagonal[:, :1].expand_as(diagonal))
        begin += block


@pytest.mark.parametrize("size", [64, 80])
def test_it_is_the_geometric_mean(size: int) -> None:
    """T^T T is proportional to M^-1 # H: A with A M A = H, up to the factor."""
    data, sensitivity = gram(size, 3), gram(size, 4)
    t = wush(data, sensitivity, 0.0)
    half = root(data)
    middle = root(half @ sensitivity @ half)
    mean = inverse(half) @ middle @ inverse(half)
    found = t.mT @ t
    factor = found[:, :1, :1] / mean[:, :1, :1]
    assert closeness(found, factor * mean) < 1e-7


def test_no_transform_does_better() -> None:
    """Theorem 3: the product of the traces is the least there is."""
    data, sensitivity = gram(64, 5), gram(64, 6)

    def product(t: torch.Tensor) -> torch.Tensor:
        back = inverse(t)
        traces = [
            m.diagonal(dim1=-2, dim2=-1).sum(-1)
            for m in (t @ data @ t.mT, back.mT @ sensitivity @ back)
        ]
        return traces[0] * traces[1]

    least = torch.linalg.svdvals(root(data) @ root(sensitivity)).sum(-1).square()
    t = wush(data, sensitivity, 0.0)
    torch.testing.assert_close(product(t), least)
    generator = torch.Generator().manual_seed(0)
    for _ in range(5):
        nudge = torch.randn(64, 64, generator=generator, dtype=torch.float64) * 1e-2
        other = t @ (torch.eye(64, dtype=torch.float64) + nudge)
        assert (product(other) > least).all()
    shape = tuple(data.shape)
    rotated = product(transforms.random_orthogonal(shape, 0))
    torch.testing.assert_close(rotated, product(transforms.identity(shape)))
    assert (rotated > 1.5 * least).all()


def test_scale_and_gauge_do_not_matter() -> None:
    data, sensitivity = gram(64, 7), gram(64, 8)
    t = wush(data, sensitivity)
    assert closeness(wush(data * 1e20, sensitivity * 1e-20), t) < 1e-9
    row = torch.randn(2, 10, 64, dtype=torch.float64)
    query = torch.randn(2, 10, 64, dtype=torch.float64)
    torch.testing.assert_close(
        ((query @ inverse(t)) * (row @ t.mT)).sum(-1), (query * row).sum(-1)
    )


def test_damping_holds_where_the_text_is_too_short() -> None:
    thin = gram(64, 9, samples=1)[:, :, :]
    rows = torch.randn(2, 5, 64, dtype=torch.float64)
    data = rows.mT @ rows
    t = wush(data, thin)
    assert t.isfinite().all()
    assert transforms.condition_numbers(t).max() < 1e3
    nothing = torch.zeros_like(data)
    for pair in ((nothing, thin), (thin, nothing), (nothing, nothing)):
        assert wush(*pair).isfinite().all()


@pytest.mark.parametrize("size", SIZES)
def test_the_orthogonal_ones_are_orthogonal(size: int) -> None:
    eye = torch.eye(size, dtype=torch.float64)
    found = [
        hadamard(size),
        transforms.random_orthogonal((3, size, size), 1),
        transforms.oscar(gram(size, 10)),
    ]
    for each in found:
        assert float((each @ each.mT - eye).abs().max()) < 1e-12
    assert torch.equal(found[0], found[0].T)
    assert not torch.equal(found[1][0], found[1][1])


def test_oscar_gives_every_coordinate_the_same_energy() -> None:
    moment = gram(128, 11)
    rotation = transforms.oscar(moment)
    diagonal = (rotation @ moment @ rotation.mT).diagonal(dim1=-2, dim2=-1)
    torch.testing.assert_close(diagonal, diagonal[:, :1].expand_as(diagonal))

# SPDX-License-Identifier: Apache-2.0
"""The Hadamard transform against its definition."""

import pytest
import torch

from polykv_vllm.formats import SUPPORTED_HEAD_DIMS, power_blocks
from polykv_vllm.reference.rotation import fwht, rotate, rotate_unnormalized


def sylvester(head_dim: int) -> torch.Tensor:
    """H[i, j] = (-1)^popcount(i & j), fp64."""
    bits = [[(i & j).bit_count() for j in range(head_dim)] for i in range(head_dim)]
    return 1.0 - 2.0 * (torch.tensor(bits, dtype=torch.float64) % 2)


POWERS = [d for d in SUPPORTED_HEAD_DIMS if d & (d - 1) == 0]


@pytest.mark.parametrize("head_dim", [1, 2, 8, *POWERS])
def test_is_the_sylvester_matrix(head_dim: int) -> None:
    eye = torch.eye(head_dim, dtype=torch.float64)
    assert torch.equal(fwht(eye), sylvester(head_dim))


@pytest.mark.parametrize("head_dim", SUPPORTED_HEAD_DIMS)
def test_rotation_is_orthonormal(head_dim: int) -> None:
    """Case 1: at every head size, powers of two or not."""
    matrix = rotate(torch.eye(head_dim))
    error = matrix @ matrix.T - torch.eye(head_dim)
    assert error.abs().max() < 1e-6


@pytest.mark.parametrize(
    ("head_dim", "blocks"),
    [(64, (64,)), (80, (64, 16)), (96, (64, 32)), (112, (64, 32, 16)), (512, (512,))],
)
def test_rotation_is_block_diagonal(head_dim: int, blocks: tuple[int, ...]) -> None:
    assert power_blocks(head_dim) == blocks
    expected = torch.block_diag(*(sylvester(b) * b**-0.5 for b in blocks))
    got = rotate(torch.eye(head_dim, dtype=torch.float64))
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-15)


@pytest.mark.parametrize("head_dim", SUPPORTED_HEAD_DIMS)
def test_unnormalized_is_the_same_up_to_a_factor(head_dim: int) -> None:
    rows = torch.randn(5, head_dim, dtype=torch.float64)
    expected = rotate(rows) * power_blocks(head_dim)[0] ** 0.5
    torch.testing.assert_close(rotate_unnormalized(rows), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("head_dim", SUPPORTED_HEAD_DIMS)
def test_rotation_is_its_own_inverse(head_dim: int) -> None:
    rows = torch.randn(3, 5, head_dim, dtype=torch.float64)
    # log2(D) additions each way, each within eps of values up to sqrt(D) |row|.
    torch.testing.assert_close(rotate(rotate(rows)), rows, rtol=0, atol=1e-13)


def test_published_example() -> None:
    v = torch.tensor([0.5, -1.25, 3, 0, -0.75, 2.25, -4, 1], dtype=torch.float64)
    z = 8**0.5 * rotate(v) / v.norm()
    expected = [0.129701, -0.562039, 0.129701, 0.129701]
    expected += [0.648507, 2.204922, -1.426714, -0.562039]
    torch.testing.assert_close(z.tolist(), expected, rtol=0, atol=5e-7)


@pytest.mark.parametrize("head_dim", [3, 96, 192])
def test_other_lengths_are_refused_by_name(head_dim: int) -> None:
    with pytest.raises(ValueError, match=str(head_dim)):
        fwht(torch.zeros(2, head_dim))

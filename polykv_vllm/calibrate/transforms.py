# SPDX-License-Identifier: Apache-2.0
"""Transforms of keys and values before they are quantized, made from statistics.

A row x is stored as Q(T x) and met by T^-T y, so every product x . y stays what it was.
`gram` is the sum of x x^T over a calibration text, `sensitivity` what an error of x
costs: the sum of y y^T over what x is multiplied with. All in fp64, `[..., head_dim,
head_dim]`, over any leading dimensions (layers, KV heads).

    wush      T = c R D^-1/4 U^T L^T   with L L^T = sensitivity, U D U^T = L^T gram L
    oscar     T = R U^T                U the eigenvectors of one matrix
    hadamard  T = R                    orthonormal Hadamard matrix
    random    T from the QR decomposition of a Gaussian matrix
    identity  T = I

Sources: WUSH-KV (arXiv 2609.38121, equation 1; its T^T T is the geometric mean of the
inverse Gram matrix and the sensitivity), OSCAR (arXiv 2605.17757; its last permutation
does nothing where one scale serves the whole row, and is left out).
"""

import torch

from polykv_vllm.formats import power_blocks
from polykv_vllm.reference.rotation import rotate

DAMPING = 1e-2
"""Share of the mean diagonal that is added to a statistic's diagonal, as published."""


def hadamard(head_dim: int) -> torch.Tensor:
    """Return the orthonormal, symmetric matrix R, fp64, block-diagonal if need be.

    The one that formats rotate values with: folding counts on their product being I.
    """
    return rotate(torch.eye(head_dim, dtype=torch.float64))


def identity(shape: tuple[int, ...]) -> torch.Tensor:
    """Return identity matrices of `[..., head_dim, head_dim]`, fp64."""
    return torch.eye(shape[-1], dtype=torch.float64).expand(shape).clone()


def random_orthogonal(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Return random rotations (Haar measure) of `[..., head_dim, head_dim]`, fp64."""
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(shape, generator=generator, dtype=torch.float64)
    q, r = torch.linalg.qr(normal)
    # Signs from R make the distribution uniform (Mezzadri, math-ph/0609050).
    return q * r.diagonal(dim1=-2, dim2=-1).sign().unsqueeze(-2)


def oscar(second_moment: torch.Tensor) -> torch.Tensor:
    """Return OSCAR's rotation `R U^T`.

    Args:
        second_moment: Of the queries for keys; of values weighted by the attention
            that their tokens draw, for values.

    """
    _, vectors = torch.linalg.eigh(_symmetric(second_moment))
    return hadamard(second_moment.shape[-1]) @ vectors.mT


def damped(matrix: torch.Tensor, damping: float) -> torch.Tensor:
    """Return `matrix + damping * mean(diagonal) * I`, symmetric."""
    matrix = _symmetric(matrix)
    mean = matrix.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]
    return matrix + damping * mean * torch.eye(matrix.shape[-1], dtype=matrix.dtype)


def wush(
    gram: torch.Tensor, sensitivity: torch.Tensor, damping: float = DAMPING
) -> torch.Tensor:
    """Return WUSH's transform.

    Every coordinate of `T x` has the same energy and the same sensitivity (by block,
    where the Hadamard matrix has several). Only the directions of both matrices count:
    scaling one by a positive number changes nothing.

    Args:
        gram: Positive semi-definite.
        sensitivity: Likewise; definite after damping.
        damping: At least 0; 0 needs full rank.

    Raises:
        torch.linalg.LinAlgError: The damped sensitivity is not positive definite.

    """
    gram, sensitivity = (_normalized(each) for each in (gram, sensitivity))
    head_dim = gram.shape[-1]
    lower = torch.linalg.cholesky(damped(sensitivity, damping))
    values, vectors = torch.linalg.eigh(
        _symmetric(lower.mT @ damped(gram, damping) @ lower)
    )
    largest = values.amax(-1, keepdim=True)
    values = values.clamp(min=largest * torch.finfo(values.dtype).eps)
    trace = gram.diagonal(dim1=-2, dim2=-1).sum(-1)
    gain = ((1 + damping) * trace / values.sqrt().sum(-1)).sqrt()[..., None, None]
    order = torch.tensor(_dealt(head_dim))
    whitened = values.pow(-0.25).unsqueeze(-1) * vectors.mT
    turned = hadamard(head_dim) @ whitened[..., order, :]
    return gain * turned @ lower.mT


def inverse(transform: torch.Tensor) -> torch.Tensor:
    """Return `T^-1`, fp64, of a transform in any float dtype."""
    return torch.linalg.inv(transform.double())


def condition_numbers(transform: torch.Tensor) -> torch.Tensor:
    """Return the ratio of the largest to the smallest singular value, `[...]` fp64."""
    values = torch.linalg.svdvals(transform.double())
    return values[..., 0] / values[..., -1]


def _symmetric(matrix: torch.Tensor) -> torch.Tensor:
    matrix = matrix.double()
    return (matrix + matrix.mT) / 2


def _normalized(matrix: torch.Tensor) -> torch.Tensor:
    """Scale to a mean diagonal of 1; a matrix of zeros becomes the identity."""
    mean = matrix.double().diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]
    eye = torch.eye(matrix.shape[-1], dtype=torch.float64)
    return torch.where(mean > 0, matrix.double() / torch.where(mean > 0, mean, 1), eye)


def _dealt(head_dim: int) -> list[int]:
    """Return an order that gives every Hadamard block its share of all eigenvalues.

    Dealt like cards: each next one goes to the block that lags most behind its share.
    """
    blocks = power_blocks(head_dim)
    hands: list[list[int]] = [[] for _ in blocks]
    for number in range(head_dim):
        lag = [
            size * (number + 1) / head_dim - len(hand)
            for size, hand in zip(blocks, hands, strict=True)
        ]
        hands[max(range(len(blocks)), key=lambda n: lag[n])].append(number)
    return [number for hand in hands for number in hand]

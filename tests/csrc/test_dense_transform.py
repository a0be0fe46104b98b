# SPDX-License-Identifier: Apache-2.0
"""Keys and queries times a matrix of their KV head, the keys centred before: the same
bits everywhere."""

from dataclasses import replace

import pytest
import torch

from polykv_vllm import ops
from polykv_vllm.formats import FORMATS, SUPPORTED_HEAD_DIMS, FormatSpec
from polykv_vllm.keys import KeyTransform
from tests.kernel_cases import (
    CPP_ISAS,
    DTYPES,
    FASTEST,
    make_batch,
    new_cache,
    worst_ratio,
)

ISAS = pytest.mark.parametrize("isa", CPP_ISAS)
HEAD_DIMS = pytest.mark.parametrize("head_dim", SUPPORTED_HEAD_DIMS)
LOW_BIT = [fmt for fmt in FORMATS.values() if fmt.is_low_bit]
NAMED = pytest.mark.parametrize(
    "fmt", [*LOW_BIT, FORMATS["polykv_k7v4"]], ids=lambda f: f.name
)
FMT = FORMATS["polykv_k2v2"]


def random_transform(
    kv_heads: int, head_dim: int, condition: float = 30
) -> KeyTransform:
    """Return centers, and matrices with singular values from 1 to `condition`."""
    u, v = torch.linalg.qr(torch.randn(2, kv_heads, head_dim, head_dim).double()).Q
    spread = torch.logspace(0, torch.tensor(condition).log10().item(), head_dim)
    centers = torch.randn(kv_heads, head_dim)
    return KeyTransform(matrices=(u * spread.double()) @ v, centers=centers)


def fma(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """Return fp32 `a * b + c`, rounded once.

    The product is exact in fp64; the sum is rounded to odd there, by its exact error,
    so that rounding it to fp32 is as good as rounding the exact sum.
    """
    product, c = a.double() * b.double(), c.double()
    total = product + c
    other = total - product
    error = (product - (total - other)) + (c - other)
    bits = total.view(torch.int64)
    towards_zero = (error > 0) != (total > 0)
    odd = torch.where(towards_zero & (bits & 1 == 0), bits - 1, bits | 1)
    return torch.where(error == 0, bits, odd).view(torch.float64).float()


def multiplied(rows: torch.Tensor, matrices: torch.Tensor) -> torch.Tensor:
    """Return rows times matrices, summed in fp32 over ascending input elements."""
    total = torch.zeros_like(rows)
    for i in range(rows.shape[-1]):
        total = fma(rows[..., i : i + 1], matrices[:, i], total)
    return total


def stored(
    isa: str,
    fmt: FormatSpec,
    key: torch.Tensor,
    transform: KeyTransform | None,
    value: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the cache after a store into zeros; values are the keys by default."""
    value = key if value is None else value
    cache = torch.zeros_like(new_cache(fmt, key.shape[-1], 32, 2, key.shape[1]))
    slots = torch.arange(key.shape[0])
    ops.reshape_and_cache(
        key, value, cache, slots, fmt, key_transform=transform, isa=isa, num_threads=1
    )
    return cache


@ISAS
@NAMED
@HEAD_DIMS
def test_keys_are_multiplied_in_a_fixed_order(
    isa: str, fmt: FormatSpec, head_dim: int
) -> None:
    """What is stored is what the reference stores of rows summed as documented."""
    key = torch.randn(13, 3, head_dim)
    transform = random_transform(3, head_dim)
    assert transform.key_matrices is not None and transform.centers is not None
    plain = multiplied(key - transform.centers, transform.key_matrices)
    size = plain.norm(dim=-1, keepdim=True)
    assert ((plain - transform.keys(key)) / size).abs().max() < head_dim * 2**-24
    cache = torch.zeros_like(new_cache(fmt, head_dim, 32, 2, 3))
    ops.reshape_and_cache(
        plain, key, cache, torch.arange(13), fmt, isa="reference", num_threads=1
    )
    assert torch.equal(stored(isa, fmt, key, transform), cache)


@ISAS
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_do_not_depend_on_their_neighbours(isa: str, dtype: torch.dtype) -> None:
    """Keys and queries one at a time, and of any number beside each other."""
    transform = random_transform(2, 64)
    batch = make_batch(
        FMT, [(9, 40), (1, 300), (3, 5)], dtype=dtype, group=3, key_transform=transform
    )
    whole = batch.run(isa, num_threads=2)
    for request, (queries, _) in enumerate(batch.requests()):
        rows = whole[batch.rows(request)]
        assert torch.equal(batch.select([request]).run(isa), rows)
        for row in range(queries):
            assert torch.equal(
                batch.chunk(request, row, row + 1).run(isa)[0], rows[row]
            )
    key = torch.randn(11, 2, 64).to(dtype)
    expected = stored(isa, FMT, key, transform)
    cache = torch.zeros_like(expected)
    for t in torch.randperm(11).tolist():
        one, slot = key[t : t + 1], torch.tensor([t])
        ops.reshape_and_cache(
            one, one, cache, slot, FMT, key_transform=transform, isa=isa
        )
    assert torch.equal(cache, expected)


@NAMED
@HEAD_DIMS
@pytest.mark.parametrize("group", [1, 7])
def test_attention_with_matrices(fmt: FormatSpec, head_dim: int, group: int) -> None:
    """Against fp64 over what was stored, with queries transformed in fp64."""
    batch = make_batch(
        fmt,
        [(1, 300), (20, 20), (0, 0), (5, 140)],
        head_dim=head_dim,
        group=group,
        key_transform=random_transform(2, head_dim, condition=4),
    )
    for isa in CPP_ISAS:
        output = batch.run(isa)
        assert worst_ratio(batch, output) <= 1
        assert torch.equal(output, batch.run(FASTEST))


@ISAS
def test_a_poisoned_key_stays_alone(isa: str) -> None:
    """Rows that share a load of the matrix share nothing else."""
    key = torch.randn(8, 2, 64)
    transform = random_transform(2, 64)
    clean = stored(isa, FMT, key, transform)
    key[5, 1, 7] = torch.nan
    got = stored(isa, FMT, key, transform)
    differs = (got != clean).any(-1)
    assert differs[0, 1, 5:6].any() or differs.sum() > 0
    good = torch.arange(8) != 5
    batch = make_batch(
        FMT,
        [(8, 8)],
        group=1,
        key=key,
        value=key.nan_to_num(),
        key_transform=transform,
        isa=isa,
    )
    output = batch.run(isa)
    assert output[:5].isfinite().all() and output[:, 0].isfinite().all()
    assert output[5:, 1].isnan().all() and good.sum() == 7


@ISAS
@pytest.mark.parametrize("rotate", [False, True])
def test_a_center_is_all_that_is_lost(isa: str, rotate: bool) -> None:
    """Of keys that lie far from zero; with numbers whose differences are exact."""
    key = (torch.randn(40, 2, 64) * 16).round() / 16
    centers = (torch.randn(2, 64) * 16).round()
    plain = KeyTransform(rotate=rotate)
    centred = KeyTransform(rotate=rotate, centers=centers)
    expected = stored(isa, FMT, key, plain)
    assert torch.equal(stored(isa, FMT, key + centers, centred, key), expected)
    assert not torch.equal(stored(isa, FMT, key, centred), expected)
    # Queries stay as they are.
    batch = make_batch(FMT, [(3, 40)], group=2, key_transform=plain, isa=isa)
    again = replace(batch, key_transform=centred)
    assert torch.equal(again.run(isa), batch.run(isa))


def test_what_knows_logits_refuses_centers() -> None:
    transform = random_transform(2, 64)
    for isa in ("reference", FASTEST):
        for terms, name in (
            (ops.LogitTerms(soft_cap=50.0), "a soft cap"),
            (ops.LogitTerms(sinks=torch.zeros(4)), "sinks"),
        ):
            with pytest.raises(ValueError, match=f"{name} of the layer"):
                ops.layer_attention(
                    FMT, 0.1, key_transform=transform, logits=terms, isa=isa
                )
            plain = KeyTransform(matrices=transform.matrices)
            ops.layer_attention(FMT, 0.1, key_transform=plain, logits=terms, isa=isa)
        slopes = ops.LogitTerms(alibi_slopes=torch.ones(4))
        ops.layer_attention(FMT, 0.1, key_transform=transform, logits=slopes, isa=isa)


def test_bad_matrices_are_named() -> None:
    with pytest.raises(ValueError, match=r"\[num_kv_heads, head_dim, head_dim\]"):
        KeyTransform(matrices=torch.eye(64))
    singular = torch.eye(64).repeat(2, 1, 1)
    singular[1, 3, 3] = 0
    with pytest.raises(ValueError, match="KV head 1 has no usable inverse"):
        KeyTransform(matrices=singular)
    singular[1, 3, 3] = torch.nan
    with pytest.raises(ValueError, match="KV head 1 has no usable inverse"):
        KeyTransform(matrices=singular)
    eye = torch.eye(64)[None]
    with pytest.raises(ValueError, match="not beside them"):
        KeyTransform(matrices=eye, rotate=True)
    with pytest.raises(ValueError, match=r"matrices \[1, 64, 64\].*\[2, 64, 64\]"):
        make_batch(FMT, [(1, 4)], key_transform=KeyTransform(matrices=eye))

# SPDX-License-Identifier: Apache-2.0
"""The algebra of the key treatments."""

import pytest
import torch

from polykv_vllm.keys import TREATMENTS, KeyTransform


def transform_of(treatment: str) -> KeyTransform:
    scales = torch.logspace(-3, 3, 192).reshape(3, 64)[:, torch.randperm(64)]
    return KeyTransform(
        scales if "scale" in treatment else None, "hadamard" in treatment
    )


@pytest.mark.parametrize("treatment", TREATMENTS)
def test_products_stay_what_they_were(treatment: str) -> None:
    transform = transform_of(treatment)
    key, query = torch.randn(40, 3, 64), torch.randn(40, 6, 64)
    expected = torch.einsum("thd,thd->th", query, key.repeat_interleave(2, 1))
    keys = transform.keys(key).repeat_interleave(2, 1)
    got = torch.einsum("thd,thd->th", transform.queries(query), keys)
    # fp32 sums of 64 products of magnitude up to 16 each.
    torch.testing.assert_close(got, expected, rtol=0, atol=64 * 16 * 2**-23)
    assert transform.treatment == treatment


@pytest.mark.parametrize("treatment", TREATMENTS)
def test_keys_come_back(treatment: str) -> None:
    transform = transform_of(treatment)
    key = torch.randn(40, 3, 64, dtype=torch.bfloat16)
    got = transform.restore_keys(transform.keys(key))
    assert got.dtype == torch.float32
    size = key.float().norm(dim=-1, keepdim=True)
    if treatment == "channel_scale_hadamard":
        # Rounding happens in the scaled basis, where the row is up to 10^3 longer.
        size = size * 1e3 * 1e3
    assert ((got - key.float()).abs() / size).max() < 16 * 2**-24


def test_key_multipliers_are_reciprocals() -> None:
    assert KeyTransform(None, True).key_multipliers is None
    scales = torch.tensor([[0.5, 4.0, 1e30]])
    multipliers = KeyTransform(scales).key_multipliers
    assert multipliers is not None
    assert torch.equal(multipliers, torch.tensor([[2.0, 0.25, 1e-30]]))


@pytest.mark.parametrize("bad", [0.0, -1.0, float("inf"), float("nan"), 1e-40])
def test_scales_that_no_kernel_could_use(bad: float) -> None:
    scales = torch.ones(2, 64)
    scales[1, 63] = bad
    with pytest.raises(ValueError, match="positive and finite"):
        KeyTransform(scales)


@pytest.mark.parametrize(
    "scales", [torch.ones(64), torch.ones(2, 64, dtype=torch.bfloat16)]
)
def test_scales_of_another_form(scales: torch.Tensor) -> None:
    with pytest.raises(ValueError, match=r"\[num_kv_heads, head_dim\] in fp32"):
        KeyTransform(scales)


def test_the_shape_that_a_cache_needs() -> None:
    KeyTransform(None, True).check_shape(7, 128)
    transform = KeyTransform(torch.ones(2, 64))
    transform.check_shape(2, 64)
    with pytest.raises(ValueError, match=r"scales \[2, 64\].*= \[4, 64\]"):
        transform.check_shape(4, 64)
    centred = KeyTransform(centers=torch.zeros(2, 64))
    with pytest.raises(ValueError, match=r"centers \[2, 64\].*= \[4, 64\]"):
        centred.check_shape(4, 64)


@pytest.mark.parametrize("treatment", [*TREATMENTS, "matrix"])
def test_centers_change_products_by_one_number(treatment: str) -> None:
    """The same for all keys that a query meets, and keys come back."""
    centers = torch.randn(3, 64) * 4
    if treatment == "matrix":
        matrices = torch.eye(64, dtype=torch.float64) + torch.randn(3, 64, 64) / 32
        transform = KeyTransform(matrices=matrices, centers=centers)
    else:
        plain = transform_of(treatment)
        transform = KeyTransform(plain.scales, plain.rotate, centers=centers)
    key, query = torch.randn(40, 3, 64) + centers, torch.randn(40, 3, 64)
    products, expected = (
        torch.einsum("qhd,khd->hqk", q.double(), k.double())
        for q, k in (
            (transform.queries(query), transform.keys(key)),
            (query, key),
        )
    )
    lost = torch.einsum("qhd,hd->hq", query, centers).double()
    torch.testing.assert_close(
        products + lost.unsqueeze(-1), expected, rtol=0, atol=64 * 64 * 2**-20
    )
    assert (transform.keys(key).norm() < transform.keys(2 * key).norm()).item()
    # Rounding happens in the scaled basis, as above.
    size = 1e6 if treatment == "channel_scale_hadamard" else 1
    restored = transform.restore_keys(transform.keys(key))
    assert (restored - key).abs().max() < size * 64 * 2**-24


@pytest.mark.parametrize(
    ("centers", "words"),
    [
        (torch.full((2, 64), torch.nan), "centers must be finite"),
        (torch.zeros(64), r"centers must be \[num_kv_heads, head_dim\] in fp32"),
        (torch.zeros(2, 64).double(), "centers must be .* in fp32"),
    ],
)
def test_centers_that_are_none(centers: torch.Tensor, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        KeyTransform(centers=centers)

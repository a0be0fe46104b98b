# SPDX-License-Identifier: Apache-2.0
"""Keys and queries that are transformed before they are quantized.

The algebra is tested in tests/keys; here, that kernels and reference agree on it, and
that every promise of the kernels holds with it.
"""

from dataclasses import replace

import pytest
import torch

from polykv_vllm import ops
from polykv_vllm.formats import SUPPORTED_HEAD_DIMS, FormatSpec, get_format
from polykv_vllm.keys import TREATMENTS, KeyProjection, KeyTransform, key_transform
from polykv_vllm.reference.attention import attention
from polykv_vllm.reference.pack import unpack_tile
from tests.forest_cases import Node, Reader, make_forest_batch, make_tables
from tests.kernel_cases import (
    ALL_ISAS,
    CPP_ISAS,
    DTYPES,
    FASTEST,
    FORMAT_LIST,
    make_batch,
    sequences,
    worst_ratio,
)

NAMED = pytest.mark.parametrize("fmt", FORMAT_LIST, ids=lambda f: f.name)
HEAD_DIMS = pytest.mark.parametrize("head_dim", SUPPORTED_HEAD_DIMS)
TREATED = pytest.mark.parametrize("treatment", TREATMENTS)
ISAS = pytest.mark.parametrize("isa", CPP_ISAS)
KV_HEADS = 2


def transform_of(
    treatment: str, head_dim: int, kv_heads: int = KV_HEADS, spread: float = 1.0
) -> KeyTransform:
    """Return scales around 1, log-normal with `spread` in units of e."""
    scales = (torch.randn(kv_heads, head_dim) * spread).exp()
    return KeyTransform(
        scales if "scale" in treatment else None, "hadamard" in treatment
    )


def projection_of(key_bias: torch.Tensor) -> KeyProjection:
    """Return what weights would say of N(0, 1) keys and queries around a key bias."""
    ones = torch.ones_like(key_bias)
    return KeyProjection(key_bias, ones, torch.zeros_like(ones), ones, None)


def stored(
    isa: str,
    fmt: FormatSpec,
    key: torch.Tensor,
    value: torch.Tensor,
    transform: KeyTransform | None,
) -> torch.Tensor:
    """Return the cache after a store into zeros."""
    tokens, heads, head_dim = key.shape
    shape = (-(-tokens // 32), heads, 32, fmt.slot_bytes(head_dim))
    cache = torch.zeros(shape, dtype=torch.uint8)
    slots = torch.arange(tokens)
    ops.reshape_and_cache(
        key, value, cache, slots, fmt, key_transform=transform, isa=isa
    )
    return cache


@ISAS
@NAMED
@HEAD_DIMS
@TREATED
def test_bytes_equal_the_reference(
    isa: str, fmt: FormatSpec, head_dim: int, treatment: str
) -> None:
    """Scales from 1e-30 to 1e30 in one head, and a dtype for each head size."""
    transform = transform_of(treatment, head_dim)
    if transform.scales is not None:
        transform.scales[1] = torch.logspace(-30, 30, head_dim)
    dtype = DTYPES[SUPPORTED_HEAD_DIMS.index(head_dim) % len(DTYPES)]
    key, value = torch.randn(2, 37, KV_HEADS, head_dim).to(dtype)
    expected = stored("reference", fmt, key, value, transform)
    assert torch.equal(stored(isa, fmt, key, value, transform), expected)
    plain = stored(isa, fmt, key, value, None)
    assert torch.equal(plain, expected) == (treatment == "none")


@pytest.mark.parametrize("isa", ALL_ISAS)
@NAMED
@HEAD_DIMS
@TREATED
def test_attention_within_the_bound(
    isa: str, fmt: FormatSpec, head_dim: int, treatment: str
) -> None:
    transform = transform_of(treatment, head_dim)
    requests = [(1, 140), (20, 53), (1, 17)]
    batch = make_batch(
        fmt, requests, head_dim=head_dim, group=3, key_transform=transform, isa=isa
    )
    assert worst_ratio(batch, batch.run(isa)) <= 1


@pytest.mark.parametrize("isa", CPP_ISAS[1:])
@HEAD_DIMS
@TREATED
def test_instruction_sets(isa: str, head_dim: int, treatment: str) -> None:
    transform = transform_of(treatment, head_dim)
    for group in (1, 7):
        batch = make_batch(
            FORMAT_LIST[0],
            [(1, 700), (45, 45), (30, 550)],
            head_dim=head_dim,
            group=group,
            dtype=torch.bfloat16,
            key_transform=transform,
        )
        assert torch.equal(batch.run(isa), batch.run(FASTEST))


@ISAS
@TREATED
@pytest.mark.parametrize("window", [-1, 100])
def test_a_row_alone(isa: str, treatment: str, window: int) -> None:
    """Neither the batch nor the chunks of a prompt nor threads change a bit."""
    batch = make_batch(
        FORMAT_LIST[1],
        [(1, 700), (45, 45), (7, 600)],
        group=3,
        window=window,
        key_transform=transform_of(treatment, 64),
    )
    whole = batch.run(isa)
    assert torch.equal(batch.run(isa, num_threads=2), whole)
    for request, (queries, _) in enumerate(batch.requests()):
        rows = whole[batch.rows(request)]
        assert torch.equal(batch.select([request]).run(isa), rows)
        last = batch.chunk(request, queries - 1, queries).run(isa)
        assert torch.equal(last[0], rows[-1])


@ISAS
@TREATED
def test_sharing(isa: str, treatment: str) -> None:
    """Nine readers of one prompt, in one pass or each alone."""
    tables = make_tables([Node(None, 20)], [Reader(0, 9 + i, 1) for i in range(9)], 32)
    batch = make_forest_batch(tables, FORMAT_LIST[0], 32, kv_heads=KV_HEADS)
    batch = replace(batch, key_transform=transform_of(treatment, 64))
    forest = batch.forest()
    assert len(forest) > 0
    expected = batch.run(isa)
    for threads in (1, 2):
        assert torch.equal(batch.run(isa, threads, forest), expected)


@TREATED
def test_products_stay_what_they_were(treatment: str) -> None:
    """Eight-bit keys and values: attention is near that over the raw ones."""
    fmt = get_format("polykv_k8v8")
    key, value = torch.randn(2, 200, KV_HEADS, 128)
    batch = make_batch(
        fmt,
        [(50, 200)],
        head_dim=128,
        key=key,
        value=value,
        key_transform=transform_of(treatment, 128, spread=0.3),
    )
    exact = attention(batch.query, key, value, batch.scale)
    error = (batch.run(FASTEST) - exact).norm() / exact.norm()
    assert error < 0.03


@pytest.mark.parametrize("isa", ALL_ISAS)
@NAMED
@TREATED
def test_poison(isa: str, fmt: FormatSpec, treatment: str) -> None:
    """Infs, NaNs, and finite keys that leave fp32 only when transformed."""
    transform = transform_of(treatment, 128)
    key, value = torch.randn(2, 6, KV_HEADS, 128)
    key[1, 0, 7] = torch.nan
    key[2, 0, 127] = -torch.inf
    value[3, 0, 0] = torch.inf
    key[4, 0] = 3e38
    overflows = treatment != "none"
    if transform.scales is not None:
        transform.scales[0, :64] = 0.5
    cache = stored(isa, fmt, key, value, transform)
    for head, poisoned in enumerate(([1, 2, 3] + [4] * overflows, [])):
        for part in unpack_tile(cache[0, head].reshape(-1), 128, fmt):
            found = part.scale[:6].isnan().nonzero().flatten().tolist()
            assert found == poisoned


@ISAS
@TREATED
def test_a_query_that_overflows_stays_in_its_row(isa: str, treatment: str) -> None:
    transform = transform_of(treatment, 64)
    batch = make_batch(FORMAT_LIST[0], [(1, 140), (20, 33)], key_transform=transform)
    expected = batch.run(isa)
    batch.query[5, 3] = 3e38
    got = batch.run(isa)
    assert got[5, 3].isnan().all()
    got[5, 3] = expected[5, 3]
    assert torch.equal(got, expected)


@pytest.mark.parametrize("isa", ALL_ISAS)
def test_scales_of_another_shape_are_named(isa: str) -> None:
    fmt = FORMAT_LIST[0]
    batch = make_batch(fmt, [(1, 40)])
    for shape in ((3, 64), (2, 128), (1, 64)):
        transform = KeyTransform(torch.ones(shape))
        expected = rf"scales \[{shape[0]}, {shape[1]}\].*\[2, 64\]"
        with pytest.raises(ValueError, match=expected):
            replace(batch, key_transform=transform).run(isa)
        rows = torch.randn(3, 2, 64)
        with pytest.raises(ValueError, match=expected):
            stored(isa, fmt, rows, rows, transform)


@NAMED
def test_keys_with_a_large_bias(fmt: FormatSpec) -> None:
    """N(0, 1) and 600 to 900 in two channels of each head, as Qwen2's keys have.

    The queries are small in those channels: a trained model's scores are not in the
    hundreds. Untreated, the bias sets the scale of the row, and the step between two
    codes (7 with 8 bits) is larger than all that differs between keys.
    """
    bias = torch.zeros(KV_HEADS, 64)
    bias[0, [5, 40]] = torch.tensor([750.0, -900.0])
    bias[1, [11, 12]] = torch.tensor([-600.0, 820.0])
    noise, value = torch.randn(2, 400, KV_HEADS, 64)
    size = torch.where(bias == 0, 2.0, 1 / 64).repeat_interleave(2, 0)
    projection = replace(
        projection_of(bias), query_bias=torch.zeros_like(size), query_spread=size
    )
    transform = key_transform("auto", projection)

    def error(key: torch.Tensor, transform: KeyTransform | None) -> float:
        batch = make_batch(
            fmt, [(200, 400)], key=key, value=value, key_transform=transform
        )
        batch.query.mul_(size)
        stored_value = sequences(batch)[0][1]  # of the keys' error only
        exact = attention(batch.query, key.double(), stored_value, batch.scale)
        return float((batch.run(FASTEST) - exact).norm() / exact.norm())

    unbiased = error(noise, None)  # 0.010 with 8 bits
    assert error(noise + bias, transform) < 2 * unbiased  # 0.012 to 0.013
    assert error(noise + bias, None) > 0.9  # 1.05 and more

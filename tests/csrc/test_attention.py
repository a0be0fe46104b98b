# SPDX-License-Identifier: Apache-2.0
"""Kernels against fp64 attention over the dequantized cache, within a derived bound.

The shape grid runs on the fastest kernels; `test_bitwise.py` shows that the others
give the same bits.
"""

import itertools

import pytest
import torch

from polykv_vllm.formats import FORMATS, SUPPORTED_HEAD_DIMS, FormatSpec
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

# Around a quad (4), a subtile (16), a block, a tile (128) and a split (512).
EDGES = (1, 2, 4, 15, 16, 17, 31, 33, 127, 128, 129, 511, 512, 513, 641)


@NAMED
@HEAD_DIMS
def test_decode_at_every_edge(fmt: FormatSpec, head_dim: int) -> None:
    batch = make_batch(fmt, [(1, n) for n in EDGES], head_dim=head_dim)
    assert worst_ratio(batch, batch.run(FASTEST)) <= 1


@NAMED
@HEAD_DIMS
def test_prefill_and_continuation(fmt: FormatSpec, head_dim: int) -> None:
    requests = [(40, 40), (129, 129), (16, 136), (33, 545), (3, 513)]
    batch = make_batch(fmt, requests, head_dim=head_dim)
    assert worst_ratio(batch, batch.run(FASTEST)) <= 1


GROUPS = (1, 2, 3, 4, 5, 7, 8, 16)


@pytest.mark.parametrize(
    ("group", "kv_heads", "fmt"),
    [
        (group, kv_heads, FORMAT_LIST[(i + j) % len(FORMAT_LIST)])
        for i, group in enumerate(GROUPS)
        for j, kv_heads in enumerate((1, 2, 3))
    ],
    ids=str,
)
@HEAD_DIMS
def test_heads_and_groups(
    group: int, kv_heads: int, fmt: FormatSpec, head_dim: int
) -> None:
    """Cases 8 (14 heads on 2) and 14: all groups, on 1, 2 and 3 KV heads.

    A mixed batch: decode, prefill, an idle request, continuation, two decodes.
    """
    requests = [(1, 130), (23, 23), (0, 0), (5, 70), (1, 1), (1, 17)]
    batch = make_batch(fmt, requests, head_dim=head_dim, kv_heads=kv_heads, group=group)
    assert worst_ratio(batch, batch.run(FASTEST)) <= 1


@NAMED
@pytest.mark.parametrize("block_size", [16, 32, 48, 128])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes_and_block_sizes(
    fmt: FormatSpec, block_size: int, dtype: torch.dtype
) -> None:
    requests = [(1, 300), (20, 60), (1, 520)]
    batch = make_batch(fmt, requests, block_size=block_size, dtype=dtype)
    assert worst_ratio(batch, batch.run(FASTEST)) <= 1


@NAMED
@pytest.mark.parametrize("window", [1, 2, 16, 100, 128, 500, 512, 700])
def test_sliding_windows(fmt: FormatSpec, window: int) -> None:
    """Case 6: parts that a window hides as a whole are empty, and neutral."""
    requests = [(1, 30), (1, 640), (70, 70), (40, 600), (1, 513)]
    batch = make_batch(fmt, requests, window=window)
    assert worst_ratio(batch, batch.run(FASTEST)) <= 1


@pytest.mark.parametrize("isa", ALL_ISAS)
@NAMED
@HEAD_DIMS
def test_every_implementation(isa: str, fmt: FormatSpec, head_dim: int) -> None:
    """Packs with one and attends with each: 16 pairs with `packer` below."""
    for packer in ALL_ISAS:
        batch = make_batch(fmt, [(1, 40), (9, 21)], head_dim=head_dim, isa=packer)
        assert worst_ratio(batch, batch.run(isa)) <= 1


@pytest.mark.parametrize("isa", CPP_ISAS)
@NAMED
@HEAD_DIMS
def test_values_come_out_exactly(isa: str, fmt: FormatSpec, head_dim: int) -> None:
    """A window of one token makes attention the identity: it unpacks the values.

    Case 2: every element of a row, the last one of D = 80 or 112 too.

    The only weight is 1, its probability 65535 of 65535; what remains is fp32
    rounding in a dozen operations and log2(D) additions.
    """
    batch = make_batch(fmt, [(150, 150)], head_dim=head_dim, kv_heads=1, window=1)
    (_, value), got = sequences(batch)[0], batch.run(isa)
    size = value.norm(dim=-1, keepdim=True)
    assert ((got - value).abs() / size).max() <= 24 * 2**-24


@pytest.mark.parametrize("isa", CPP_ISAS)
@pytest.mark.parametrize("fmt", ["polykv_k8v3", "polykv_k8v8"])
def test_integer_sums_do_not_overflow(isa: str, fmt: str) -> None:
    """D = 512 and every product at its largest, with the same sign.

    A score is the sum of D products of a key code (-127..127; the bytes are biased by
    128) and a query code (up to 32639): 127 * 32639 * 512 = 2.122e9 < 2^31. With the
    bias still in it a sum may wrap around; taking 128 * sum of the query's codes =
    2.139e9 away, modulo 2^32, brings it back. Sums of values are 65535 * 127 * 128 =
    1.07e9 at any D.
    """
    for sign in itertools.product((1.0, -1.0), repeat=2):
        batch = make_batch(
            FORMATS[fmt],
            [(1, 256)],
            head_dim=512,
            kv_heads=1,
            key=torch.full((256, 1, 512), sign[0]),
            value=torch.full((256, 1, 512), 3.0),
        )
        batch.query.fill_(sign[1])
        assert worst_ratio(batch, batch.run(isa)) <= 1


@pytest.mark.parametrize("isa", CPP_ISAS)
@NAMED
def test_zero_values_count_in_the_denominator(isa: str, fmt: FormatSpec) -> None:
    """A row of zeros has scale 0, but its weight belongs to the sum."""
    value = torch.randn(200, 1, 64)
    value[::2] = 0
    key = torch.zeros(200, 1, 64)  # equal weights: 1/200 each
    batch = make_batch(fmt, [(1, 200)], kv_heads=1, key=key, value=value)
    got = batch.run(isa)
    assert worst_ratio(batch, got) <= 1
    mean = sequences(batch)[0][1].sum(0) / 200
    torch.testing.assert_close(got[0, :1].double(), mean, rtol=0, atol=1e-4)


@pytest.mark.parametrize("isa", CPP_ISAS)
@NAMED
def test_all_values_zero(isa: str, fmt: FormatSpec) -> None:
    batch = make_batch(fmt, [(1, 200), (5, 20)], value=torch.zeros(220, 2, 64))
    assert torch.equal(batch.run(isa), torch.zeros_like(batch.query))


@pytest.mark.parametrize("isa", CPP_ISAS)
@NAMED
def test_values_of_very_different_norms(isa: str, fmt: FormatSpec) -> None:
    """Norms of 1e-30 beside 1e30, and each alone in its tile."""
    value = torch.randn(300, 2, 64)
    value[:128] *= 1e-30
    value[128:256:2] *= 1e30
    batch = make_batch(fmt, [(1, 300)], value=value)
    assert worst_ratio(batch, batch.run(isa)) <= 1
    small = make_batch(fmt, [(1, 100), (20, 28)], value=value[:128])
    assert worst_ratio(small, small.run(isa)) <= 1


@pytest.mark.parametrize("isa", CPP_ISAS)
@NAMED
@pytest.mark.parametrize("norm", [0.0, 1e-20, 30.0, 3000.0])
def test_queries_of_any_norm(isa: str, fmt: FormatSpec, norm: float) -> None:
    """From a uniform softmax to one that takes a single key.

    At 3000 scores reach 10^4: what matters there is that nothing overflows.
    """
    batch = make_batch(fmt, [(1, 300), (12, 140)])
    batch.query.mul_(norm)
    assert worst_ratio(batch, batch.run(isa)) <= 1


@pytest.mark.parametrize("isa", CPP_ISAS)
def test_keys_of_any_norm(isa: str) -> None:
    key = torch.randn(200, 2, 64)
    key[::3] = 0
    key[1::3] *= 1e-30
    batch = make_batch(FORMATS["polykv_k7v4"], [(1, 200)], key=key)
    assert worst_ratio(batch, batch.run(isa)) <= 1

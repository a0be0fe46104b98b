# SPDX-License-Identifier: Apache-2.0
"""Full-precision windows: right, and the promise of equal bits holds with them."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from polykv_vllm.formats import FORMATS, SUPPORTED_HEAD_DIMS, FormatSpec
from polykv_vllm.keys import KeyTransform
from tests.csrc.test_bitwise import MIXED
from tests.csrc.test_dense_transform import random_transform
from tests.csrc.test_key_transform import transform_of
from tests.csrc.test_logit_terms import TERMS
from tests.kernel_cases import (
    ALL_ISAS,
    CPP_ISAS,
    DTYPES,
    FASTEST,
    FORMAT_LIST,
    Batch,
    make_batch,
    worst_ratio,
)
from tests.window_cases import Copies, random_copies, with_windows

ISAS = pytest.mark.parametrize("isa", CPP_ISAS)
# Every head size, with one of the formats; two of them with all.
SHAPES = pytest.mark.parametrize(
    ("fmt", "head_dim"),
    [
        (fmt, dim)
        for i, dim in enumerate(SUPPORTED_HEAD_DIMS)
        for j, fmt in enumerate(FORMAT_LIST)
        if dim in (64, 112) or (i + j) % len(FORMAT_LIST) == 0
    ],
    ids=lambda x: str(getattr(x, "name", x)),
)
# (sinks, recent): none, one tier, within a granule, beyond a tile, the whole sequence.
WINDOWS = [(0, 1), (4, 0), (4, 32), (64, 256), (33, 100), (5000, 7), (0, 5000)]
REQUESTS = [(1, 700), (40, 40), (1, 1), (30, 333), (0, 0), (3, 129)]
FMT = FORMATS["polykv_k8v3"]


@SHAPES
@pytest.mark.parametrize(("kv_heads", "group"), [(1, 8), (2, 3)])
def test_against_fp64(
    fmt: FormatSpec, head_dim: int, kv_heads: int, group: int
) -> None:
    batch = make_batch(fmt, REQUESTS, head_dim=head_dim, kv_heads=kv_heads, group=group)
    windowed = with_windows(batch, random_copies(batch), 4, 50)
    got = windowed.run(FASTEST)
    assert worst_ratio(windowed, got) <= 1
    # It is the windows that are tested: the cached tokens alone give another result.
    assert worst_ratio(windowed, batch.run(FASTEST)) > 10


@pytest.mark.parametrize("sliding", [-1, 20, 300])
@pytest.mark.parametrize(("sinks", "recent"), WINDOWS)
def test_every_window(sinks: int, recent: int, sliding: int) -> None:
    batch = make_batch(FMT, REQUESTS, window=sliding)
    windowed = with_windows(batch, random_copies(batch), sinks, recent)
    assert worst_ratio(windowed, windowed.run(FASTEST)) <= 1


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("isa", ALL_ISAS)
def test_every_implementation(isa: str, dtype: torch.dtype) -> None:
    """Around S, S + W and the edges of pages."""
    lengths = [3, 4, 5, 31, 33, 35, 36, 37, 63, 65]
    requests = [*((1, n) for n in lengths), (36, 36), (37, 64)]
    batch = make_batch(FMT, requests, dtype=dtype)
    windowed = with_windows(batch, random_copies(batch), 4, 32)
    assert worst_ratio(windowed, windowed.run(isa)) <= 1


@pytest.mark.parametrize("kind", TERMS)
@pytest.mark.parametrize("sliding", [-1, 60])
def test_logit_terms(kind: str, sliding: int) -> None:
    """A sink of the softmax counts once, not once for each part."""
    batch = make_batch(FMT, REQUESTS, group=3, window=sliding, logits=TERMS[kind])
    batch.query.mul_(3)
    windowed = with_windows(batch, random_copies(batch), 4, 50)
    assert worst_ratio(windowed, windowed.run(FASTEST)) <= 1


@pytest.mark.parametrize(
    "transform",
    [
        transform_of("channel_scale_hadamard", 64),
        random_transform(2, 64, 4.0),
        KeyTransform(centers=torch.linspace(-2, 2, 128).view(2, 64)),
    ],
    ids=["scales and Hadamard", "matrix", "centers"],
)
@ISAS
def test_raw_keys_meet_the_query_as_it_came(isa: str, transform: KeyTransform) -> None:
    batch = make_batch(FMT, REQUESTS[1:], group=3, key_transform=transform)
    windowed = with_windows(batch, random_copies(batch), 4, 50)
    assert worst_ratio(windowed, windowed.run(isa)) <= 1


def test_fast_arithmetic_leaves_raw_tokens_alone() -> None:
    batch = make_batch(FMT, REQUESTS)
    copies = random_copies(batch)
    raw_only = with_windows(batch, copies, 0, 5000)
    assert torch.equal(raw_only.run(FASTEST, fast=True), raw_only.run(FASTEST))
    both = with_windows(batch, copies, 4, 50)
    fast, exact = both.run(FASTEST, fast=True), both.run(FASTEST)
    assert 0 < (fast - exact).norm() / exact.norm() < 1e-2


@ISAS
def test_empty_windows_are_none(isa: str) -> None:
    """Not a bit differs from attention without windows."""
    batch = make_batch(FMT, REQUESTS)
    windowed = with_windows(batch, random_copies(batch), 0, 0)
    assert torch.equal(windowed.run(isa), batch.run(isa))


@ISAS
def test_what_is_seen_raw_is_not_read_from_the_cache(isa: str) -> None:
    batch = make_batch(FMT, REQUESTS)
    windowed = with_windows(batch, random_copies(batch), 0, 5000)
    expected = windowed.run(isa)
    batch.kv_cache.fill_(0xFF)
    assert torch.equal(windowed.run(isa), expected)
    assert expected[: len(batch.query)].isfinite().all()


@ISAS
def test_lost_copies(isa: str) -> None:
    """Tokens before `recent_begin` are attended to as cached."""
    batch = make_batch(FMT, [(1, 300), (20, 200), (60, 130)])
    windowed = with_windows(batch, random_copies(batch), [4, 0, 9], 100, [280, 170, 70])
    assert worst_ratio(windowed, windowed.run(isa)) <= 1


@ISAS
def test_unused_page_slots_have_no_influence(isa: str) -> None:
    batch = make_batch(FMT, REQUESTS)
    copies = random_copies(batch)
    outputs = []
    for fill in (0xFF, 0):
        torch.manual_seed(7)  # the same pages
        windowed = with_windows(batch, copies, 4, 50, fill=fill)
        outputs.append(windowed.run(isa))
    assert torch.equal(*outputs)
    assert outputs[0].isfinite().all()


@ISAS
def test_a_later_poisoned_token_is_not_seen(isa: str) -> None:
    """A NaN in a token of the chunk reaches the queries from it on, and no others."""
    batch = make_batch(FMT, [(40, 90)])
    copies = random_copies(batch)
    expected = with_windows(batch, copies, 4, 20).run(isa)
    copies.key[0][70], copies.value[0][75] = torch.nan, torch.inf
    got = with_windows(batch, copies, 4, 20).run(isa)
    assert torch.equal(got[:20], expected[:20])
    assert not got[20:40].isfinite().any()


def assert_each_row_alone(
    batch: Batch, copies: Copies, windows: tuple[int, int], isa: str
) -> torch.Tensor:
    """Compare requests and queries alone with the batch; return its result."""
    whole = with_windows(batch, copies, *windows).run(isa)
    for request, (queries, length) in enumerate(batch.requests()):
        if queries == 0:
            continue
        rows = whole[batch.rows(request)]
        alone = batch.select([request]), copies.select([request])
        assert torch.equal(with_windows(*alone, *windows).run(isa), rows)
        for row in {0, queries // 2, queries - 1}:
            end = length - queries + row + 1
            one = batch.chunk(request, row, row + 1), copies.until(request, end)
            assert torch.equal(with_windows(*one, *windows).run(isa)[0], rows[row])
    return whole


@ISAS
@pytest.mark.parametrize("group", [1, 3, 8])
@pytest.mark.parametrize("windows", [(4, 32), (64, 256)], ids=str)
def test_alone_or_in_a_batch(isa: str, group: int, windows: tuple[int, int]) -> None:
    batch = make_batch(FMT, MIXED, group=group, dtype=torch.bfloat16)
    assert_each_row_alone(batch, random_copies(batch), windows, isa)


@ISAS
@pytest.mark.parametrize(
    "requests", [[(1, 1400)], [(1, 700), (1, 5)], MIXED], ids=["one", "two", "many"]
)
def test_threads(isa: str, requests: list[tuple[int, int]]) -> None:
    batch = make_batch(FMT, requests)
    windowed = with_windows(batch, random_copies(batch), 4, 50)
    one = windowed.run(isa, num_threads=1)
    for threads in (2, 3):
        assert torch.equal(windowed.run(isa, num_threads=threads), one)


@pytest.mark.parametrize("isa", CPP_ISAS[1:])
@SHAPES
def test_instruction_sets(isa: str, fmt: FormatSpec, head_dim: int) -> None:
    batch = make_batch(fmt, MIXED[:3], head_dim=head_dim, group=3)
    windowed = with_windows(batch, random_copies(batch), 4, 40)
    assert torch.equal(windowed.run(isa), windowed.run(FASTEST))


@pytest.mark.parametrize("isa", CPP_ISAS[1:])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", [None, "all"])
def test_instruction_sets_by_dtype(
    isa: str, dtype: torch.dtype, kind: str | None
) -> None:
    logits = None if kind is None else TERMS[kind]
    batch = make_batch(FMT, MIXED[:4], group=3, dtype=dtype, logits=logits, window=200)
    windowed = with_windows(batch, random_copies(batch), 4, 100)
    assert torch.equal(windowed.run(isa), windowed.run(FASTEST))


@ISAS
@settings(max_examples=12)
@given(data=st.data(), fmt=st.sampled_from(FORMAT_LIST), group=st.sampled_from([1, 3]))
def test_any_windows(isa: str, data: Any, fmt: FormatSpec, group: int) -> None:
    """Any windows, lengths, lost copies, chunks and threads."""
    phases = st.sampled_from([0, 1, 1, 5, 40])
    drawn = data.draw(st.lists(st.tuples(phases, st.integers(0, 280)), max_size=4))
    requests = [(q, q + context) for q, context in [*drawn, (37, 140)]]
    sinks, recent = data.draw(st.integers(0, 80)), data.draw(st.integers(0, 200))
    sliding = data.draw(st.sampled_from([-1, -1, 1, 70, 200]))
    begins = [
        data.draw(st.integers(0, n - q)) if data.draw(st.booleans()) else 0
        for q, n in requests
    ]
    batch = make_batch(fmt, requests, kv_heads=1, group=group, window=sliding)
    copies = random_copies(batch)
    windowed = with_windows(batch, copies, sinks, recent, begins)
    got = windowed.run(isa)
    assert worst_ratio(windowed, got) <= 1
    threads = data.draw(st.sampled_from([2, 3]))
    assert torch.equal(windowed.run(isa, num_threads=threads), got)
    last = len(requests) - 1
    cuts = data.draw(st.lists(st.integers(1, 36), max_size=3, unique=True))
    for begin, end in pairwise(sorted({0, 37, *cuts})):
        chunk = batch.chunk(last, begin, end)
        part = with_windows(
            chunk, copies.until(last, 140 + end), sinks, recent, begins[last:]
        )
        rows = slice(batch.rows(last).start + begin, batch.rows(last).start + end)
        assert torch.equal(part.run(isa), got[rows])

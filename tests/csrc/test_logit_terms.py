# SPDX-License-Identifier: Apache-2.0
"""Soft cap, ALiBi slopes and sinks: right, and the promise of equal bits holds."""

import math
from dataclasses import replace

import pytest
import torch

from polykv_vllm import ops
from polykv_vllm.formats import FORMATS, FormatSpec
from tests.csrc.test_bitwise import MIXED, assert_each_row_alone, with_unused_bytes
from tests.csrc.test_sharing_limits import NODES, READERS
from tests.forest_cases import make_forest_batch, make_tables
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

NAMED = pytest.mark.parametrize("fmt", FORMAT_LIST, ids=lambda f: f.name)
HEADS = 6  # two KV heads, groups of three

TERMS = {
    "cap": ops.LogitTerms(soft_cap=1.5),
    "alibi": ops.LogitTerms(
        alibi_slopes=torch.tensor([0.5, 0.25, 0.0, 0.01, 2.0, -0.001])
    ),
    "sinks": ops.LogitTerms(sinks=torch.tensor([0.0, 3.0, -4.0, 8.0, -50.0, 60.0])),
    "all": ops.LogitTerms(
        2.0, torch.linspace(0.01, 0.5, HEADS), torch.linspace(-3, 3, HEADS)
    ),
}
KINDS = pytest.mark.parametrize("kind", TERMS)


def with_terms(kind: str, fmt: FormatSpec, requests: list[tuple[int, int]]) -> Batch:
    """Queries of norm 3, so that logits reach several times the cap."""
    batch = make_batch(fmt, requests, group=3, logits=TERMS[kind])
    batch.query.mul_(3)
    return batch


@NAMED
@KINDS
def test_against_fp64(kind: str, fmt: FormatSpec) -> None:
    batch = with_terms(kind, fmt, [(1, 300), (40, 170), (0, 0), (5, 5), (1, 1)])
    got = batch.run(FASTEST)
    assert worst_ratio(batch, got) <= 1
    # It is the terms that are tested: without them the result is another one.
    assert worst_ratio(batch, replace(batch, logits=None).run(FASTEST)) > 10


@pytest.mark.parametrize("isa", ALL_ISAS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@KINDS
def test_every_implementation(isa: str, dtype: torch.dtype, kind: str) -> None:
    for window in (-1, 9):
        batch = make_batch(
            FORMATS["polykv_k8v4"],
            [(1, 40), (9, 21)],
            group=3,
            dtype=dtype,
            window=window,
            logits=TERMS[kind],
        )
        assert worst_ratio(batch, batch.run(isa)) <= 1


@pytest.mark.parametrize("isa", CPP_ISAS)
@KINDS
def test_alone_or_in_a_batch(isa: str, kind: str) -> None:
    batch = with_terms(kind, FORMATS["polykv_k7v4"], MIXED[:4])
    assert_each_row_alone(batch, isa, batch.run(isa))


@pytest.mark.parametrize("isa", CPP_ISAS[1:])
@pytest.mark.parametrize("window", [-1, 100])
@KINDS
def test_instruction_sets(isa: str, kind: str, window: int) -> None:
    batch = replace(with_terms(kind, FORMAT_LIST[0], MIXED), window=window)
    assert torch.equal(batch.run(isa), batch.run(FASTEST))


@pytest.mark.parametrize("isa", CPP_ISAS)
@KINDS
def test_threads_and_splits(isa: str, kind: str) -> None:
    """A sink counts once, however many parts of the sequence are merged."""
    batch = with_terms(kind, FORMAT_LIST[0], [(1, 1400), (1, 700)])
    one = batch.run(isa, num_threads=1)
    assert worst_ratio(batch, one) <= 1
    for threads in (2, 3):
        assert torch.equal(batch.run(isa, num_threads=threads), one)


@pytest.mark.parametrize("window", [-1, 200])
@KINDS
def test_shared_prefixes(kind: str, window: int) -> None:
    tables = make_tables(NODES, READERS, 32)
    batch = make_forest_batch(tables, FORMAT_LIST[1], 32, window=window)
    heads = batch.query.shape[1]
    terms = TERMS[kind]
    slopes, sinks = (
        None if t is None else t.repeat(-(-heads // HEADS))[:heads].contiguous()
        for t in (terms.alibi_slopes, terms.sinks)
    )
    batch = replace(batch, logits=ops.LogitTerms(terms.soft_cap, slopes, sinks))
    forest = batch.forest()
    assert forest
    assert torch.equal(batch.run(FASTEST, 2, forest), batch.run(FASTEST))
    assert worst_ratio(batch, batch.run(FASTEST, 2, forest)) <= 1


@pytest.mark.parametrize("isa", CPP_ISAS)
@pytest.mark.parametrize("fill", [0xFF, 0])
@KINDS
def test_garbage_has_no_influence(isa: str, fill: int, kind: str) -> None:
    batch = make_batch(
        FORMAT_LIST[0], [(1, 150), (10, 37)], group=3, window=20, logits=TERMS[kind]
    )
    assert torch.equal(with_unused_bytes(batch, fill).run(isa), batch.run(isa))


@pytest.mark.parametrize("isa", CPP_ISAS)
def test_tanh(isa: str) -> None:
    """Two tokens, one of value 0: the output is a sigmoid of the capped logit.

    Relative error of tanh and its neighbours 1e-6, of exp2 5e-6, of a query of 16 bits
    2^-15 / 2, of probabilities 2^-16.
    """
    fmt = FORMATS["polykv_k8v8"]
    key, value = torch.zeros(2, 1, 64), torch.zeros(2, 1, 64)
    one = 127 / 128  # a scale of 2^-7, exactly
    key[0] = value[0] = one
    cap = 4.0
    for logit in (0.0, 1e-6, 0.01, 0.5, 3.0, 8.0, 40.0, 1e4, 1e30, -0.5, -8.0, -1e30):
        batch = make_batch(
            fmt,
            [(1, 2)],
            kv_heads=1,
            group=1,
            key=key,
            value=value,
            logits=ops.LogitTerms(soft_cap=cap),
        )
        batch.query.fill_(logit / 64 / one)
        got = replace(batch, scale=1.0).run(isa)[0, 0, 0].item()
        expected = one / (1 + math.exp(-cap * math.tanh(logit / cap)))
        assert got == pytest.approx(expected, rel=4e-5)


@pytest.mark.parametrize("isa", ALL_ISAS)
def test_extreme_sinks(isa: str) -> None:
    """One that is infinitely small changes nothing; a huge one leaves nothing."""
    plain = make_batch(FORMAT_LIST[0], [(1, 300), (9, 30)], kv_heads=1, group=2)
    expected = plain.run(isa)
    for small in (-math.inf, -1e30):
        sinks = torch.full((2,), small)
        got = replace(plain, logits=ops.LogitTerms(sinks=sinks)).run(isa)
        torch.testing.assert_close(got, expected, rtol=2**-22, atol=1e-7)
    sinks = torch.full((2,), 1e30)
    got = replace(plain, logits=ops.LogitTerms(sinks=sinks)).run(isa)
    assert got.abs().max() < 1e-30


@pytest.mark.parametrize("isa", CPP_ISAS)
@KINDS
@pytest.mark.parametrize("poison", [float("inf"), float("nan")])
def test_poison_stays_with_its_request(isa: str, kind: str, poison: float) -> None:
    """Case 5: neither a cap nor a sink hides a NaN, or hands it on."""
    fmt = FORMAT_LIST[0]
    key, value = torch.randn(2, 77, 2, 64)
    clean = make_batch(
        fmt, [(1, 40), (3, 37)], group=3, key=key, value=value, logits=TERMS[kind]
    )
    key = key.clone()
    key[5, 1, 7] = poison
    block, offset = clean.block_table[0, 0].long(), 5
    slots = (block * 32 + offset).reshape(1)
    cache = clean.kv_cache.clone()
    ops.reshape_and_cache(key[5:6], value[5:6], cache, slots, fmt, isa=isa)
    expected, got = clean.run(isa), replace(clean, kv_cache=cache).run(isa)
    assert got[0, 3:].isnan().all()
    assert torch.equal(got[0, :3], expected[0, :3])
    assert torch.equal(got[1:], expected[1:])

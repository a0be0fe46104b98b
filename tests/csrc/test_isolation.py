# SPDX-License-Identifier: Apache-2.0
"""A NaN or an inf of one request stays there, and is not hidden there either."""

import pytest
import torch

from polykv_vllm import ops
from polykv_vllm.formats import FormatSpec
from tests.kernel_cases import ALL_ISAS, CPP_ISAS, FORMAT_LIST, make_batch

NAMED = pytest.mark.parametrize("fmt", FORMAT_LIST, ids=lambda f: f.name)
POISON = pytest.mark.parametrize("poison", [float("inf"), float("-inf"), float("nan")])
REQUESTS = [(1, 140), (20, 33), (1, 600)]
VICTIM = slice(140, 173)  # tokens of request 1 among those stored


def outputs(
    fmt: FormatSpec, isa: str, rows: torch.Tensor, **options: int
) -> list[torch.Tensor]:
    """Store `rows` (keys, values), attend; one output per request."""
    torch.manual_seed(5)  # the same blocks and queries whatever the rows are
    batch = make_batch(
        fmt, REQUESTS, key=rows[0], value=rows[1], dtype=rows.dtype, **options
    )
    whole = batch.run(isa, num_threads=2)
    return [whole[batch.rows(r)] for r in range(len(REQUESTS))]


@pytest.mark.parametrize("isa", CPP_ISAS)
@NAMED
@POISON
@pytest.mark.parametrize("part", [0, 1], ids=["key", "value"])
def test_other_requests_do_not_change(
    isa: str, fmt: FormatSpec, poison: float, part: int
) -> None:
    clean = torch.randn(2, 773, 2, 64)
    bad = clean.clone()
    bad[part, VICTIM.start + 15, 1, 3] = poison
    expected, got = outputs(fmt, isa, clean), outputs(fmt, isa, bad)
    assert torch.equal(got[0], expected[0])
    assert torch.equal(got[2], expected[2])
    # Queries are the tokens 13..32: token 15 is seen by all but the first two, and
    # only by the query heads of its KV head.
    assert torch.equal(got[1][:2], expected[1][:2])
    assert got[1][2:, 2:].isnan().all()
    assert torch.equal(got[1][:, :2], expected[1][:, :2])


@pytest.mark.parametrize("isa", ALL_ISAS)
@pytest.mark.parametrize("value", [65504.0, 1e30, 3e38])
def test_large_values_do_not_leak(isa: str, value: float) -> None:
    """Norms near the largest bf16 may overflow their own request, never another."""
    clean = torch.randn(2, 773, 2, 64)
    bad = clean.clone()
    bad[:, VICTIM] *= value
    expected = outputs(FORMAT_LIST[0], isa, clean)
    got = outputs(FORMAT_LIST[0], isa, bad)
    assert torch.equal(got[0], expected[0])
    assert torch.equal(got[2], expected[2])


@pytest.mark.parametrize("isa", CPP_ISAS)
@NAMED
@POISON
def test_bad_query_stays_in_its_row(isa: str, fmt: FormatSpec, poison: float) -> None:
    batch = make_batch(fmt, REQUESTS, group=3)
    expected = batch.run(isa)
    batch.query[5, 4, 63] = poison
    got = batch.run(isa)
    assert got[5, 4].isnan().all()
    got[5, 4] = expected[5, 4]
    assert torch.equal(got, expected)


@pytest.mark.parametrize("isa", CPP_ISAS)
@NAMED
def test_poison_that_left_the_window_is_gone(isa: str, fmt: FormatSpec) -> None:
    clean = torch.randn(2, 773, 2, 64)
    bad = clean.clone()
    bad[:, :100] = torch.nan
    expected = outputs(fmt, isa, clean, window=40)
    for got, wanted in zip(outputs(fmt, isa, bad, window=40), expected, strict=True):
        assert torch.equal(got, wanted)


@pytest.mark.parametrize("isa", CPP_ISAS)
@NAMED
@pytest.mark.parametrize("tokens", [1, 16, 128, 600])
def test_whole_tiles_of_poison(isa: str, fmt: FormatSpec, tokens: int) -> None:
    """A maximum over NaN scores must not pass for an empty tile."""
    clean = torch.randn(2, 773, 2, 64)
    bad = clean.clone()
    bad[0, 173 : 173 + tokens] = torch.nan
    got = outputs(fmt, isa, bad)
    assert got[2].isnan().all()
    assert got[0].isfinite().all()


@pytest.mark.parametrize("isa", CPP_ISAS)
@NAMED
def test_reused_slots_forget_poison(isa: str, fmt: FormatSpec) -> None:
    """A block that held a poisoned request serves the next one."""
    key, value = torch.randn(2, 40, 2, 64)
    batch = make_batch(fmt, [(1, 40)], key=key, value=value)
    expected = batch.run(isa)
    token = torch.arange(40)
    slots = batch.block_table[0, token // 32].long() * 32 + token % 32
    nan = torch.full_like(key, torch.nan)
    ops.reshape_and_cache(nan, nan, batch.kv_cache, slots, fmt, isa=isa)
    assert batch.run(isa).isnan().all()
    ops.reshape_and_cache(key, value, batch.kv_cache, slots, fmt, isa=isa)
    assert torch.equal(batch.run(isa), expected)

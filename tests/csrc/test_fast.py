# SPDX-License-Identifier: Apache-2.0
"""Fast arithmetic: probabilities of 8 bits. Same promises, a wider error."""

import pytest
import torch

from polykv_vllm.formats import SUPPORTED_HEAD_DIMS, FormatSpec
from tests.csrc.test_bitwise import MIXED
from tests.csrc.test_sharing import mixed_batch
from tests.kernel_cases import CPP_ISAS, FASTEST, FORMAT_LIST, make_batch

FORMATS = pytest.mark.parametrize("fmt", FORMAT_LIST, ids=lambda f: f.name)

MAX_ERROR = 1e-2


@FORMATS
@pytest.mark.parametrize("head_dim", SUPPORTED_HEAD_DIMS)
def test_error(fmt: FormatSpec, head_dim: int) -> None:
    """Against the reference: within the bound, and really another arithmetic."""
    batch = make_batch(fmt, [(1, 2000), (40, 600)], head_dim=head_dim, group=3)
    expected = batch.run("reference")
    errors = [
        ((batch.run(FASTEST, fast=fast) - expected).norm() / expected.norm()).item()
        for fast in (False, True)
    ]
    assert errors[0] < 1e-3 < errors[1] < MAX_ERROR


@FORMATS
@pytest.mark.parametrize("head_dim", SUPPORTED_HEAD_DIMS)
@pytest.mark.parametrize("isa", CPP_ISAS[1:])
def test_instruction_sets(fmt: FormatSpec, head_dim: int, isa: str) -> None:
    for group in (1, 3, 8):
        batch = make_batch(fmt, MIXED, head_dim=head_dim, group=group)
        assert torch.equal(batch.run(isa, fast=True), batch.run(FASTEST, fast=True))


@pytest.mark.parametrize("isa", CPP_ISAS)
@pytest.mark.parametrize("window", [-1, 300])
def test_sharing_and_threads_change_no_bit(isa: str, window: int) -> None:
    batch = mixed_batch(FORMAT_LIST[0], window, kv_heads=2)
    expected = batch.run(isa, fast=True)
    for threads in (1, 3):
        assert torch.equal(batch.run(isa, threads, batch.forest(), True), expected)


def test_a_nan_stays_in_its_row() -> None:
    batch = make_batch(FORMAT_LIST[0], [(4, 300)])
    expected = batch.run(FASTEST, fast=True)
    batch.query[1] = torch.nan
    got = batch.run(FASTEST, fast=True)
    assert got[1].isnan().all()
    assert torch.equal(got[[0, 2, 3]], expected[[0, 2, 3]])

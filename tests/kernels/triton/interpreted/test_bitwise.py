# SPDX-License-Identifier: Apache-2.0
"""A row's bits depend on the row and on the cached bytes alone."""

import pytest
import torch

from polykv_vllm.formats import FORMATS
from tests.forest_cases import Node, Reader, make_forest_batch, make_tables
from tests.gpu_cases import only_interpreted, run_triton
from tests.kernel_cases import make_batch, worst_ratio

pytestmark = only_interpreted

K8V3, K7V4 = FORMATS["polykv_k8v3"], FORMATS["polykv_k7v4"]


def test_company_changes_nothing() -> None:
    batch = make_batch(K8V3, [(1, 70), (18, 40), (2, 530)], kv_heads=1)
    together = run_triton(batch)
    for request in range(3):
        alone = run_triton(batch.select([request]))
        assert torch.equal(alone, together[batch.rows(request)])


def test_chunks_change_nothing() -> None:
    """Chained prefill, split items of few rows, and decode one by one: equal bits."""
    batch = make_batch(K7V4, [(22, 540)], kv_heads=1)
    whole = run_triton(batch)
    pieces = [
        run_triton(batch.chunk(0, begin, end))
        for begin, end in ((0, 18), (18, 21), (21, 22))
    ]
    assert torch.equal(torch.cat(pieces), whole)


def test_sharing_changes_nothing() -> None:
    """A prompt of two splits, one reader with half of it, drafts and a private one."""
    nodes = [Node(None, 5), Node(0, 4)]
    readers = [Reader(1, 3, 1), Reader(1, 20, 2), Reader(0, 9, 1), Reader(None, 30, 1)]
    tables = make_tables(nodes, readers, 128)
    batch = make_forest_batch(tables, K8V3, 128, group=3)
    assert len(batch.forest()) > 0
    apart = run_triton(batch)
    assert worst_ratio(batch, apart) <= 1
    assert torch.equal(run_triton(batch, shared=True), apart)


def test_sharing_under_a_window() -> None:
    tables = make_tables([Node(None, 9)], [Reader(0, 3, 1), Reader(0, 40, 1)], 128)
    batch = make_forest_batch(tables, K8V3, 128, window=700)
    apart = run_triton(batch)
    assert worst_ratio(batch, apart) <= 1
    assert torch.equal(run_triton(batch, shared=True), apart)


def test_turns_of_heads_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    from polykv_vllm.kernels.triton import scratch

    batch = make_batch(K8V3, [(1, 40), (9, 9)], kv_heads=3)
    at_once = run_triton(batch)
    monkeypatch.setattr(scratch, "SCRATCH_BYTES", 1)
    assert scratch.heads_in_flight(100, 2, 64, 3) == 1
    assert torch.equal(run_triton(batch), at_once)

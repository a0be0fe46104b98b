# SPDX-License-Identifier: Apache-2.0
"""The oracle with windows: the same tokens as one sequence's windows, from pages."""

from dataclasses import replace

import pytest
import torch

from polykv_vllm.keys import KeyTransform
from polykv_vllm.reference.cache import gather
from polykv_vllm.reference.windows import Windows, windowed_attention
from tests.kernel_cases import BYTE_KEYS, Batch, make_batch
from tests.window_cases import Copies, random_copies, with_windows

FMT = BYTE_KEYS[0]


def expected(
    batch: Batch, copies: Copies, request: int, windows: Windows
) -> torch.Tensor:
    """Return what a prompt computed at once gives for the request's queries."""
    queries, length = batch.requests()[request]
    coarse = gather(
        batch.kv_cache, batch.block_table[request], length, batch.query.shape[-1], FMT
    )
    query = torch.zeros(length, *batch.query.shape[1:])
    query[length - queries :] = batch.query[batch.rows(request)]
    exact = (copies.key[request], copies.value[request])
    heads_first = [rows.transpose(0, 1) for rows in (query, *exact, *coarse)]
    output = windowed_attention(
        *heads_first[:3],
        (heads_first[3], heads_first[4]),
        batch.scale,
        windows,
        batch.window if batch.window > 0 else None,
    )
    return output.transpose(0, 1)[length - queries :]


@pytest.mark.parametrize("sliding", [-1, 40])
@pytest.mark.parametrize("sinks", [0, 4, 33, 500])
@pytest.mark.parametrize("recent", [0, 1, 32, 50, 500])
def test_pages_and_chunk_are_one_sequence(
    sliding: int, sinks: int, recent: int
) -> None:
    batch = make_batch(FMT, [(1, 97), (30, 30), (40, 130), (0, 0)], window=sliding)
    copies = random_copies(batch)
    got = with_windows(batch, copies, sinks, recent).run("reference")
    for request in range(3):
        rows = expected(batch, copies, request, Windows(sinks, recent))
        torch.testing.assert_close(got[batch.rows(request)], rows, rtol=1e-4, atol=1e-5)


def test_raw_keys_lose_what_cached_ones_lack() -> None:
    """Centred keys are one softmax with raw ones; of every key they lack the same."""
    batch = make_batch(FMT, [(3, 97), (20, 60)])
    copies = random_copies(batch)
    got = with_windows(batch, copies, 4, 30).run("reference")
    centers = torch.randn(batch.kv_cache.shape[1], batch.query.shape[-1]) * 8
    far = Copies([key + centers for key in copies.key], copies.value)
    centred = replace(batch, key_transform=KeyTransform(centers=centers))
    again = with_windows(centred, far, 4, 30).run("reference")
    torch.testing.assert_close(again, got, rtol=1e-4, atol=1e-4)
    missed = with_windows(batch, far, 4, 30).run("reference")
    assert (missed - got).abs().max() > 0.1


def test_lost_copies_are_seen_as_cached() -> None:
    """A shorter window with the same end, for the one query there is."""
    batch = make_batch(FMT, [(1, 97), (1, 40)])
    copies = random_copies(batch)
    got = with_windows(batch, copies, [0, 4], 50, [70, 39]).run("reference")
    for request, windows in enumerate((Windows(0, 27), Windows(4, 1))):
        rows = expected(batch, copies, request, windows)
        torch.testing.assert_close(
            got[request : request + 1], rows, rtol=1e-4, atol=1e-5
        )

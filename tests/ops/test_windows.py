# SPDX-License-Identifier: Apache-2.0
"""Windows that do not fit raise before a pointer is followed, and are named."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from polykv_vllm import ops
from polykv_vllm.formats import FORMATS
from tests.kernel_cases import ALL_ISAS, FASTEST, Batch, make_batch
from tests.ops.test_arguments import int32
from tests.window_cases import random_copies, with_windows

FMT = FORMATS["polykv_k8v3"]


def windowed() -> Batch:
    """Two requests: one query over 100 tokens, 5 over 40."""
    batch = make_batch(FMT, [(1, 100), (5, 40)])
    return with_windows(batch, random_copies(batch), 4, 50)


def changed_windows(batch: Batch, **changes: Any) -> Batch:
    """Return the batch with other windows."""
    assert batch.windows is not None
    return replace(batch, windows=replace(batch.windows, **changes))


def changed_rows(batch: Batch, **changes: Any) -> Batch:
    """Return the batch with other raw rows."""
    assert batch.raw is not None
    return replace(batch, raw=replace(batch.raw, **changes))


WINDOWS = {
    "negative": ({"recent_tokens": -1}, "at least 0, not -1"),
    "sinks dtype": ({"sink_tokens": torch.tensor([4, 4])}, "sink_tokens .*int64"),
    "begin dims": ({"recent_begin": int32([0], [0])}, "recent_begin"),
    "pages dims": ({"sink_pages": int32(0, 1)}, "sink_pages"),
    "few requests": ({"recent_begin": int32(0)}, "recent_begin has 1 of 2 requests"),
    "few pages": ({"recent_pages": int32([0])}, "recent_pages has 1 of 2 requests"),
}


@pytest.mark.parametrize("case", WINDOWS)
def test_windows(case: str) -> None:
    changes, message = WINDOWS[case]
    with pytest.raises(ValueError, match=message):
        changed_windows(windowed(), **changes).run(FASTEST)


VALUES = {
    "sink page": {"sink_pages": int32([-1], [0])},
    "far page": {"sink_pages": int32([0], [99])},
    "no sink page": {"sink_pages": torch.empty(2, 0, dtype=torch.int32)},
    "recent page": {"recent_pages": int32([0, -1, 1], [0, 1, 0])},
    "few recent pages": {"recent_pages": int32([0], [0])},
    "late begin": {"recent_begin": int32(50, 36)},
    "negative begin": {"recent_begin": int32(-1, 0)},
}


@pytest.mark.parametrize("isa", ALL_ISAS)
@pytest.mark.parametrize("case", VALUES)
def test_values(case: str, isa: str) -> None:
    """Nothing is written, whoever finds it."""
    batch = changed_windows(windowed(), **VALUES[case])
    with pytest.raises(ValueError, match=r"page|recent"):
        batch.run(isa)


ROWS = {
    "key heads": ({"key": torch.zeros(6, 1, 64)}, r"raw key .*\[6, 1, 64\]"),
    "few values": ({"value": torch.zeros(5, 2, 64)}, r"raw value .*\[5, 2, 64\]"),
    "key stride": ({"key": torch.zeros(6, 2, 128)[..., ::2]}, r"\(256, 128, 2\)"),
    "dtype": ({"key": torch.zeros(6, 2, 64).half()}, "raw key is torch.float16"),
    "page tokens": (
        {"window_cache": torch.zeros(9, 2, 2, 16, 64)},
        r"window_cache .*\[9, 2, 2, 16, 64\]",
    ),
    "page stride": (
        {"window_cache": torch.zeros(9, 2, 2, 64, 32).transpose(3, 4)},
        "contiguous",
    ),
    "cache dtype": ({"window_cache": torch.zeros(9, 2, 2, 32, 64).half()}, "float16"),
}


@pytest.mark.parametrize("isa", [FASTEST, "reference"])
@pytest.mark.parametrize("case", ROWS)
def test_rows(case: str, isa: str) -> None:
    changes, message = ROWS[case]
    with pytest.raises(ValueError, match=message):
        changed_rows(windowed(), **changes).run(isa)


@pytest.mark.parametrize("isa", [FASTEST, "reference"])
def test_windows_and_rows_go_together(isa: str) -> None:
    batch = windowed()
    with pytest.raises(ValueError, match="windows but no rows"):
        replace(batch, raw=None).run(isa)
    with pytest.raises(ValueError, match="raw rows but no windows"):
        replace(batch, windows=None).run(isa)


@pytest.mark.parametrize("isa", ALL_ISAS)
def test_padding_may_hold_anything(isa: str) -> None:
    """Requests without queries, and pages that no query needs."""
    batch = make_batch(FMT, [(1, 100), (0, 40)])
    copies = random_copies(batch)
    expected = with_windows(batch, copies, 4, 50)
    assert expected.windows is not None
    tables = expected.windows
    wild = changed_windows(
        expected,
        sink_tokens=int32(4, -9),
        recent_begin=int32(int(tables.recent_begin[0]), 999),
        sink_pages=torch.cat((tables.sink_pages[:1], int32([999])[:, :1])),
        recent_pages=torch.cat(
            (tables.recent_pages[:1], torch.full_like(tables.recent_pages[:1], 999))
        ),
    )
    assert torch.equal(wild.run(isa), expected.run(isa))


def test_a_layer_goes_on_without_windows() -> None:
    """What a layer keeps between calls does not outlive the batch."""
    batch = windowed()
    attend = ops.layer_attention(FMT, batch.scale)
    rows = (batch.block_table, batch.seq_lens, batch.query_start_loc)
    plain, output = ops.AttentionBatch(*rows), torch.empty_like(batch.query)
    attend(batch.query, batch.kv_cache, output, plain)
    first = output.clone()
    with_them = ops.AttentionBatch(*rows, windows=batch.windows)
    attend(batch.query, batch.kv_cache, output, with_them, raw=batch.raw)
    assert torch.equal(output, batch.run(FASTEST))
    assert not torch.equal(output, first)
    attend(batch.query, batch.kv_cache, output, plain)
    assert torch.equal(output, first)

# SPDX-License-Identifier: Apache-2.0
from typing import Any

import pytest
import torch


def common(causal: Any = True) -> Any:
    """Two requests of 3 and 1 query tokens, in buffers padded for 4 requests."""
    from vllm.v1.attention.backend import CommonAttentionMetadata

    starts = torch.tensor([0, 3, 4, 4, 4], dtype=torch.int32)
    return CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=torch.tensor([40, 7, 0, 0], dtype=torch.int32),
        num_reqs=2,
        num_actual_tokens=4,
        max_query_len=3,
        max_seq_len=40,
        block_table_tensor=torch.arange(8, dtype=torch.int32).view(4, 2),
        slot_mapping=torch.tensor([37, 38, 39, 70, -1, -1]),
        causal=causal,
    )


@pytest.fixture
def builder() -> Any:
    from polykv_vllm.attention.metadata import PolyKVMetadataBuilder

    return PolyKVMetadataBuilder(None, ["layer"], None, torch.device("cpu"))


def test_padding_requests_are_left_out(builder: Any) -> None:
    metadata = builder.build(0, common())
    assert metadata.query_start_loc.tolist() == [0, 3, 4]
    assert metadata.seq_lens.tolist() == [40, 7]
    assert metadata.block_table.tolist() == [[0, 1], [2, 3]]


@pytest.mark.parametrize("causal", [False, torch.tensor([True, False])])
def test_other_than_causal_is_refused(builder: Any, causal: Any) -> None:
    with pytest.raises(NotImplementedError, match="causal attention only"):
        builder.build(0, common(causal))


def test_block_table_of_another_group(builder: Any) -> None:
    metadata = builder.build(0, common())
    table = torch.arange(8, 16, dtype=torch.int32).view(4, 2)
    slots = torch.tensor([1, 2, 3, 4])
    other = builder.update_block_table(metadata, table, slots)
    assert other.block_table.tolist() == [[8, 9], [10, 11]]
    assert other.slot_mapping is slots
    assert metadata.block_table.tolist() == [[0, 1], [2, 3]]
    assert other.seq_lens is metadata.seq_lens

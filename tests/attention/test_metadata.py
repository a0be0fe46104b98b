# SPDX-License-Identifier: Apache-2.0
from types import SimpleNamespace
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


def make_builder(
    sharing: bool = True, sliding_window: int | None = None, merged: bool = False
) -> Any:
    """Return a builder for 9 query heads over 3 KV heads, blocks of 128 tokens.

    `merged`: the window is that of some layers in a group with full attention.
    """
    from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

    from polykv_vllm.attention.metadata import PolyKVMetadataBuilder

    shape = {
        "block_size": 128,
        "num_kv_heads": 3,
        "head_size": 64,
        "dtype": torch.uint8,
    }
    spec = (
        SlidingWindowSpec(sliding_window=sliding_window, **shape)
        if sliding_window and not merged
        else FullAttentionSpec(sliding_window=sliding_window, **shape)
    )
    model = SimpleNamespace(get_num_attention_heads=lambda parallel: 9)
    config = SimpleNamespace(
        model_config=model,
        parallel_config=None,
        compilation_config=SimpleNamespace(static_forward_context={"layer": None}),
        additional_config={"polykv": {"prefix_sharing": sharing}},
    )
    return PolyKVMetadataBuilder(spec, ["layer"], config, torch.device("cpu"))


@pytest.fixture
def builder() -> Any:
    return make_builder()


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


@pytest.mark.parametrize("sharing", [True, False])
def test_tells_the_metrics(sharing: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from polykv_vllm.attention import sharing as module
    from polykv_vllm.metrics import Recorder, worker_file

    recorder = Recorder(worker_file.private_figures())
    batches: list[Any] = []
    monkeypatch.setattr(module, "get_recorder", lambda: recorder)
    monkeypatch.setattr(
        Recorder, "record_batch", lambda self, batch, group: batches.append(batch)
    )
    make_builder(sharing).build(0, two_agents(400))
    (batch,) = batches
    assert batch.shared_tokens == (2 * 384 if sharing else 0)
    assert batch.unshared_tokens == {
        "no_other_reader": 2 * 15,
        "own_chunk": 2,
        "cost_rule": 0,
    } | ({} if sharing else {"switched_off": 2 * 384})
    assert batch.prefixes == batch.readers_max // 2 == int(sharing)
    # One layer, 3 KV heads: bytes as stored, and 2 x 64 elements in 16 bits.
    assert batch.physical_bytes == (384 * 3 * 128 if sharing else 0)
    assert batch.logical_bytes == (2 * 384 * 3 * 128 * 2 if sharing else 0)


def two_agents(seq_len: int) -> Any:
    """Two decodes over the same three blocks and one own block each."""
    batch = common()
    batch.query_start_loc = torch.tensor([0, 1, 2, 2, 2], dtype=torch.int32)
    batch.seq_lens = torch.tensor([seq_len, seq_len, 0, 0], dtype=torch.int32)
    batch.block_table_tensor = torch.tensor(
        [[5, 6, 7, 1], [5, 6, 7, 2], [0] * 4, [0] * 4], dtype=torch.int32
    )
    return batch


@pytest.mark.parametrize(
    ("window", "segments"), [(None, [[0, 3, 0, 2]]), (200, [[1, 3, 0, 2]])]
)
def test_finds_what_requests_share(window: int | None, segments: list[Any]) -> None:
    forest = make_builder(sliding_window=window).build(0, two_agents(400)).forest
    assert forest.segments.tolist() == segments
    assert forest.readers.tolist() == [0, 1]


def test_a_window_of_some_layers_limits_no_others() -> None:
    builder = make_builder(sliding_window=200, merged=True)
    assert builder.build(0, two_agents(400)).forest.segments.tolist() == [[0, 3, 0, 2]]


def test_sharing_can_be_switched_off() -> None:
    assert make_builder(sharing=False).build(0, two_agents(400)).forest is None


def test_another_group_has_its_own_forest() -> None:
    metadata = make_builder().build(0, two_agents(400))
    table = torch.tensor([[5, 6, 7, 1], [5, 8, 9, 2]], dtype=torch.int32)
    other = make_builder(sliding_window=500).update_block_table(metadata, table, table)
    assert other.forest.segments.tolist() == [[0, 1, 0, 2]]
    assert metadata.forest.segments.tolist() == [[0, 3, 0, 2]]

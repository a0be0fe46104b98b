# SPDX-License-Identifier: Apache-2.0
"""A layer's implementation between vLLM's tensors and the ops."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from polykv_vllm import ops
from polykv_vllm.errors import UnsupportedError
from polykv_vllm.formats import get_format

NUM_HEADS, NUM_KV_HEADS, HEAD_SIZE, BLOCK_SIZE = 4, 2, 64, 32
SCALE = HEAD_SIZE**-0.5


@pytest.fixture
def make() -> Iterator[Any]:
    """Build a layer's implementation under an engine configuration."""
    from vllm.config import VllmConfig, set_current_vllm_config

    from polykv_vllm.attention.impl import PolyKVImpl

    config = VllmConfig(additional_config={"polykv": {"isa": "scalar"}})

    def make(**changes: Any) -> Any:
        arguments = {"kv_cache_dtype": "polykv", "num_kv_heads": NUM_KV_HEADS}
        return PolyKVImpl(NUM_HEADS, HEAD_SIZE, SCALE, **arguments | changes)

    with set_current_vllm_config(config):
        yield make


def metadata(seq_len: int, query_len: int) -> Any:
    from polykv_vllm.attention.metadata import PolyKVMetadata

    return PolyKVMetadata(
        num_actual_tokens=query_len,
        query_start_loc=torch.tensor([0, query_len], dtype=torch.int32),
        seq_lens=torch.tensor([seq_len], dtype=torch.int32),
        block_table=torch.tensor([[2, 1]], dtype=torch.int32),
        slot_mapping=torch.tensor([]),
    )


SINKS = torch.tensor([0.0, 3.0, -4.0, 8.0])
SLOPES = [0.5, 0.25, 0.125, 0.0625]


@pytest.mark.parametrize("sliding_window", [None, 7])
@pytest.mark.parametrize(
    ("layer", "logits"),
    [
        ({}, ops.LogitTerms()),
        ({"logits_soft_cap": 3.0}, ops.LogitTerms(soft_cap=3.0)),
        (
            {"alibi_slopes": SLOPES},
            ops.LogitTerms(alibi_slopes=torch.tensor(SLOPES)),
        ),
        ({"sinks": SINKS.bfloat16()}, ops.LogitTerms(sinks=SINKS)),
    ],
    ids=["plain", "cap", "alibi", "sinks"],
)
def test_stores_and_attends(
    make: Any, sliding_window: int | None, layer: dict[str, Any], logits: Any
) -> None:
    impl = make(sliding_window=sliding_window, kv_cache_dtype="polykv_k7v4", **layer)
    fmt = get_format("polykv_k7v4")
    num_tokens, padding = 40, 3
    key, value = torch.randn(2, num_tokens + padding, NUM_KV_HEADS, HEAD_SIZE)
    query = torch.randn(num_tokens + padding, NUM_HEADS, HEAD_SIZE)
    shape = (3, NUM_KV_HEADS, BLOCK_SIZE, fmt.slot_bytes(HEAD_SIZE))
    cache = torch.zeros(shape, dtype=torch.uint8)
    slots = torch.cat([torch.arange(64, 96), torch.arange(32, 40)])
    slots = torch.cat([slots, torch.full((padding,), -1)])
    impl.do_kv_cache_update(None, key, value, cache, slots)

    output = torch.full_like(query, 42.0)
    batch = metadata(num_tokens, num_tokens)
    impl.forward(None, query, key, value, cache, batch, output)

    expected = torch.full_like(query, 42.0)
    ops.paged_attention(
        query,
        cache,
        expected,
        batch.block_table,
        batch.seq_lens,
        batch.query_start_loc,
        fmt,
        SCALE,
        sliding_window or -1,
        key_transform=impl.key_transform,
        logits=logits,
        isa="scalar",
    )
    assert torch.equal(output, expected)
    assert torch.equal(output[num_tokens:], query[num_tokens:] * 0 + 42.0)
    assert not torch.equal(output[:num_tokens], expected[:num_tokens] * 0 + 42.0)
    assert cache[0].count_nonzero() == 0  # the null block


@pytest.mark.parametrize("loader_says_so", [True, False])
def test_sinks_are_those_of_the_loaded_weights(make: Any, loader_says_so: bool) -> None:
    """The layer is made before its weights are there, and they may be reloaded."""
    sinks = torch.nn.Parameter(torch.zeros(NUM_HEADS), requires_grad=False)
    impl = make(sinks=sinks)
    rows = torch.randn(1, NUM_HEADS, HEAD_SIZE)
    shape = (3, NUM_KV_HEADS, BLOCK_SIZE, impl.fmt.slot_bytes(HEAD_SIZE))
    cache = torch.zeros(shape, dtype=torch.uint8)
    impl.do_kv_cache_update(
        None, rows[:, :2], rows[:, 2:], cache, torch.tensor([2 * BLOCK_SIZE])
    )
    outputs = {}
    for i, value in enumerate((0.0, 100.0) if loader_says_so else (100.0, 0.0)):
        sinks.data.fill_(value)
        if loader_says_so or i > 0:  # a reload always does
            impl.process_weights_after_loading(torch.float32)
        output = torch.empty_like(rows)
        impl.forward(None, rows, rows, rows, cache, metadata(1, 1), output)
        outputs[value] = output
    assert outputs[0.0].abs().max() > 0.1
    assert outputs[100.0].abs().max() < 1e-6


def test_slopes_of_another_number_of_heads_are_refused(make: Any) -> None:
    with pytest.raises(ValueError, match="2 alibi_slopes for 4 query heads"):
        make(alibi_slopes=[0.5, 0.25])


def test_profiling_has_no_metadata(make: Any) -> None:
    output = torch.full((2, NUM_HEADS, HEAD_SIZE), 42.0)
    rows = torch.zeros_like(output)
    assert make().forward(None, rows, rows, rows, rows, None, output) is output
    assert output.min() == 42.0


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"attn_type": "encoder_only"}, "encoder_only attention"),
        ({"attn_type": "encoder_decoder"}, "encoder_decoder attention"),
        ({"kv_sharing_target_layer_name": "layers.0"}, "KV sharing"),
        ({"chunk_lookback": 4}, "the argument chunk_lookback"),
    ],
)
def test_refuses_what_the_kernels_lack(
    make: Any, changes: dict[str, Any], reason: str
) -> None:
    with pytest.raises(UnsupportedError, match=f"polykv does not support {reason}"):
        make(**changes)


def test_refuses_quantized_output(make: Any) -> None:
    rows = torch.zeros(2, NUM_HEADS, HEAD_SIZE)
    scale = torch.ones(1)
    with pytest.raises(NotImplementedError, match="quantized attention output"):
        make().forward(None, rows, rows, rows, rows, None, rows, output_scale=scale)

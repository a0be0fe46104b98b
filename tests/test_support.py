# SPDX-License-Identifier: Apache-2.0
from types import SimpleNamespace
from typing import Any

import pytest

from polykv_vllm.support import ARCHITECTURES, check_model


def model(**changes: Any) -> SimpleNamespace:
    """A Llama config with 4 query heads on 2 KV heads, D=64, 3 layers."""
    base = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 256,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 3,
    }
    return SimpleNamespace(**base | changes)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_served(architecture: str, head_dim: int) -> None:
    support = check_model(
        model(architectures=[architecture], head_dim=head_dim), "polykv"
    )
    assert support.ok and support.reasons == ()
    assert support.head_size == head_dim


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel is not served"),
        ({"architectures": None, "model_type": "llama"}, "only the type llama"),
        ({"is_encoder_decoder": True}, "encoder-decoder"),
        ({"kv_lora_rank": 512}, "MLA"),
        ({"head_dim": 48}, "head size 48"),
        ({"head_dim": 576}, "head size 576"),
        ({"use_bidirectional_attention": True}, "both directions"),
        ({"is_causal": False}, "is not causal"),
        ({"dual_chunk_attention_config": {"chunk_size": 1}}, "dual chunk"),
        ({"layer_types": ["linear_attention", "full_attention"]}, "linear_attention"),
        ({"num_attention_heads": None}, "lacks"),
        ({"num_kv_shared_layers": 2}, "between layers (num_kv_shared_layers=2)"),
    ],
)
def test_refused_with_the_reason(changes: dict[str, Any], reason: str) -> None:
    support = check_model(model(**changes), "polykv")
    assert not support.ok
    assert any(reason in text for text in support.reasons)


def test_impossible_models_are_not_called_untested_too() -> None:
    support = check_model(
        model(architectures=["DeepseekV2ForCausalLM"], kv_lora_rank=512), "polykv"
    )
    assert len(support.reasons) == 1 and "MLA" in support.reasons[0]


def test_a_known_reason_is_given() -> None:
    support = check_model(model(architectures=["Llama4ForCausalLM"]), "polykv")
    assert "Llama4ForCausalLM is not served: it attends in chunks" in support.reasons[0]


def test_a_hybrid_counts_its_attention_layers() -> None:
    kinds = ["linear_attention", "linear_attention", "full_attention"]
    support = check_model(
        model(architectures=["Qwen3NextForCausalLM"], layer_types=kinds), "polykv"
    )
    assert support.ok
    assert (support.num_layers, support.num_linear_layers) == (1, 2)
    assert support.bytes_per_token == 2 * 92


@pytest.mark.parametrize(
    ("changes", "num_kv_heads"),
    [
        ({"multi_query": True}, 1),
        ({"multi_query": False}, 4),
        ({"multi_query": True, "new_decoder_architecture": True}, 2),
    ],
)
def test_kv_heads_of_both_generations_of_falcon(
    changes: dict[str, Any], num_kv_heads: int
) -> None:
    falcon = {"model_type": "falcon", "num_kv_heads": 2, "num_key_value_heads": None}
    assert check_model(model(**falcon | changes), "polykv").num_kv_heads == num_kv_heads


class Heterogeneous(SimpleNamespace):
    """As transformers' configs whose layers differ: no number holds for all."""

    is_heterogeneous = True

    @property
    def head_dim(self) -> int:
        raise RuntimeError("an attribute of each layer")

    num_key_value_heads = head_dim


def heterogeneous(**per_layer: list[int]) -> Heterogeneous:
    layers = [
        SimpleNamespace(**dict(zip(per_layer, values, strict=True)))
        for values in zip(*per_layer.values(), strict=True)
    ]
    values = vars(model(num_hidden_layers=len(layers)))
    del values["num_key_value_heads"]
    return Heterogeneous(**values, per_layer_config=layers)


def test_each_layer_counts_with_its_own_heads() -> None:
    config = heterogeneous(head_dim=[256, 256, 512], num_key_value_heads=[2, 2, 1])
    support = check_model(config, "polykv")
    assert support.ok, support.reasons
    assert support.bytes_per_token == 2 * 2 * 356 + 708
    assert support.uncompressed_bytes_per_token() == 2 * 2 * 1024 + 2048
    described = "2 layers, 2 KV heads x 256; 1 layer, 1 KV head x 512"
    assert support.describe_layers() == described


def test_each_layer_is_looked_at() -> None:
    config = heterogeneous(head_dim=[256, 576, 0], num_key_value_heads=[2, 2, 2])
    assert "the size of the heads" in check_model(config, "polykv").reasons[0]
    config = heterogeneous(head_dim=[256, 576], num_key_value_heads=[2, 2])
    (reason,) = check_model(config, "polykv").reasons
    assert "head size 576" in reason


def test_unknown_dtype_names_the_known_ones() -> None:
    support = check_model(model(), "fp8")
    assert "'fp8'" in support.reasons[0] and "polykv_k7v4" in support.reasons[0]
    with pytest.raises(ValueError, match="no format"):
        _ = support.bytes_per_token


def test_bytes() -> None:
    support = check_model(model(), "polykv")
    assert support.bytes_per_token == 3 * 2 * 92
    assert support.uncompressed_bytes_per_token() == 3 * 2 * 256
    assert support.uncompressed_bytes_per_token(itemsize=4) == 3 * 2 * 512


def test_head_size_may_be_left_to_the_hidden_size() -> None:
    assert check_model(model(head_dim=None), "polykv").head_size == 64


def test_kv_heads_default_to_query_heads() -> None:
    assert check_model(model(num_key_value_heads=None), "polykv").num_kv_heads == 4


@pytest.mark.parametrize(
    ("changes", "num_sliding_layers"),
    [
        ({}, 0),
        ({"sliding_window": 512}, 3),
        ({"sliding_window": 512, "use_sliding_window": False}, 0),
        (
            {
                "sliding_window": 512,
                "layer_types": ["sliding_attention"] * 2 + ["full_attention"],
            },
            2,
        ),
    ],
)
def test_sliding_layers(changes: dict[str, Any], num_sliding_layers: int) -> None:
    support = check_model(model(**changes), "polykv")
    assert support.num_sliding_layers == num_sliding_layers
    assert support.sliding_window == (512 if num_sliding_layers else None)

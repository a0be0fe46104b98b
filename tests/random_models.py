# SPDX-License-Identifier: Apache-2.0
"""Small models of each family whose weights, norms and biases are random."""

from pathlib import Path
from typing import Any

import torch

from polykv_vllm.keys import KeyProjection, RotaryPairs

SHAPE = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "vocab_size": 512,
    "initializer_range": 0.05,
    "max_position_embeddings": 2048,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"num_key_value_heads": 2, "head_dim": 64}),
    "qwen2": ("qwen2", {"num_key_value_heads": 2}),
    "qwen3": ("qwen3", {"head_dim": 128}),
    "gemma3": ("gemma3_text", {"head_dim": 256, "sliding_window": 64}),
}


VOCABULARY = SHAPE["vocab_size"]


def save_model(directory: Path, family: str, changes: dict[str, Any]) -> Path:
    """Write a model with random weights and no tokenizer; returns the directory."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **SHAPE | changes)
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    return directory


def save_random_model(directory: Path, family: str, key_bias: float = 0.0) -> Any:
    """Write a model whose norms and biases are random too; returns it.

    Two key channels of each head get a bias of `key_bias`, with which no score grows:
    the same channels of the queries have small weights and no bias.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    name, changes = FAMILIES[family]
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(name, **SHAPE | changes)
    )
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "norm" in parameter_name:
                parameter.add_(torch.randn_like(parameter) * 0.2)
            elif parameter_name.endswith("bias"):
                parameter.normal_(0, 0.5)
        if key_bias:
            for layer in model.model.layers:
                q, k = layer.self_attn.q_proj, layer.self_attn.k_proj
                large = torch.arange(k.bias.shape[0]) % 32 == 5
                k.bias[large] += key_bias
                small = torch.arange(q.bias.shape[0]) % 32 == 5
                q.weight[small] /= key_bias
                q.bias[small] = 0
    model.save_pretrained(directory)
    return model


def expected_projection(model: Any, layer: int) -> KeyProjection:
    """Compute from the weights, in fp64, what the engine is to find by asking."""
    config, block = model.config, model.model.layers[layer]
    attention, head_dim = block.self_attn, block.self_attn.head_dim
    one = 1 if config.model_type.startswith("gemma") else 0
    gain = block.input_layernorm.weight.double() + one
    out = []
    for kind in ("k", "q"):
        linear = getattr(attention, f"{kind}_proj")
        spread = (linear.weight.double() * gain).norm(dim=1).view(-1, head_dim)
        bias = torch.zeros_like(spread)
        if linear.bias is not None:
            bias = linear.bias.double().view(-1, head_dim)
        if norm := getattr(attention, f"{kind}_norm", None):
            rms = (bias.square() + spread.square()).mean(-1, keepdim=True).sqrt()
            weight = norm.weight.double() + one
            bias, spread = bias * weight / rms, spread * weight.abs() / rms
        out += [bias.detach().float(), spread.detach().float()]
    return KeyProjection(*out, RotaryPairs(head_dim))

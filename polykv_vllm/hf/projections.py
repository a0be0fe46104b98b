# SPDX-License-Identifier: Apache-2.0
"""What a transformers model's weights say about its keys, layer by layer."""

from typing import Any

import torch

from polykv_vllm.errors import UnsupportedError
from polykv_vllm.keys import KeyProjection, RotaryPairs, after_head_norm

_NORMS_ADD_ONE = ("gemma",)  # Gemma's norms multiply by 1 + weight


def read_projections(model: Any) -> list[KeyProjection]:
    """Return the projection of each attention layer, in order.

    For Llama, Qwen2, Qwen3, Gemma 3 and models that name their parts alike: `q_proj`
    and `k_proj`, `input_layernorm`, maybe `q_norm` and `k_norm` of the heads.

    Args:
        model: A causal language model of transformers.

    Raises:
        UnsupportedError: A layer has no such parts.

    """
    config = model.config.get_text_config(decoder=True)
    decoder = getattr(model.base_model, "language_model", model.base_model)
    layers = getattr(decoder, "layers", None)
    if layers is None:
        raise UnsupportedError(f"{type(model).__name__} has no list of decoder layers")
    return [_read_layer(config, index, layer) for index, layer in enumerate(layers)]


def _read_layer(config: Any, index: int, layer: torch.nn.Module) -> KeyProjection:
    attention: Any = getattr(layer, "self_attn", None)
    missing = [name for name in ("q_proj", "k_proj") if not hasattr(attention, name)]
    if missing or not hasattr(layer, "input_layernorm"):
        raise UnsupportedError(
            f"layer {index} of {config.model_type} has no self_attn with q_proj and "
            "k_proj after an input_layernorm, from which to choose a key treatment; "
            'key_treatment="none" needs none'
        )
    add_one = config.model_type.startswith(_NORMS_ADD_ONE)
    gain = _gain(layer.input_layernorm, add_one)
    head_dim = attention.head_dim
    sides: dict[str, torch.Tensor] = {}
    for name in ("key", "query"):
        projection = getattr(attention, f"{name[0]}_proj")
        bias, spread = _channels(projection, gain, head_dim)
        norm = getattr(attention, f"{name[0]}_norm", None)
        if norm is not None:
            bias, spread = after_head_norm(bias, spread, _gain(norm, add_one))
        sides |= {f"{name}_bias": bias, f"{name}_spread": spread}
    return KeyProjection(**sides, rotary=_rotary(config, head_dim))


def _gain(norm: Any, add_one: bool) -> torch.Tensor:
    gain: torch.Tensor = norm.weight.detach().float()
    return 1 + gain if add_one else gain


def _channels(
    projection: Any, gain: torch.Tensor, head_dim: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return bias and spread `[heads, head_dim]` fp32 of a linear layer's outputs."""
    weight = projection.weight.detach().float()
    spread = (weight * gain).norm(dim=1)
    bias = projection.bias
    bias = torch.zeros_like(spread) if bias is None else bias.detach().float()
    return bias.view(-1, head_dim), spread.view(-1, head_dim)


def _rotary(config: Any, head_dim: int) -> RotaryPairs:
    parameters = getattr(config, "rope_parameters", None) or {}
    # Where layer types differ in theirs, the rotated part is the same.
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    factor = (nested[0] if nested else parameters).get("partial_rotary_factor", 1.0)
    return RotaryPairs(dim=int(head_dim * (factor or 1.0)))

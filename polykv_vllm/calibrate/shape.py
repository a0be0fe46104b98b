# SPDX-License-Identifier: Apache-2.0
"""What a transform must fit: the model's layers, heads, and what RoPE does."""

from typing import Any, Self

import torch
from pydantic import BaseModel, ConfigDict

from polykv_vllm.errors import UnsupportedError


class ModelShape(BaseModel):
    """The part of a model's config that a calibration depends on.

    Attributes:
        model_type: As in the config.
        num_layers: Attention layers.
        num_heads: Query heads of a layer.
        num_kv_heads: KV heads of a layer.
        head_dim: Elements of a head.
        hidden_size: Inputs of a layer.
        rope: RoPE's settings, sorted by name; scaling (YaRN) belongs to them.

    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    model_type: str
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    rope: dict[str, Any]

    @classmethod
    def of(cls, config: Any) -> Self:
        """Read a config of transformers."""
        config = config.get_text_config(decoder=True)
        num_heads = config.num_attention_heads
        rope = getattr(config, "rope_parameters", None) or {}
        return cls(
            model_type=config.model_type,
            num_layers=config.num_hidden_layers,
            num_heads=num_heads,
            num_kv_heads=getattr(config, "num_key_value_heads", None) or num_heads,
            head_dim=getattr(config, "head_dim", None)
            or config.hidden_size // num_heads,
            hidden_size=config.hidden_size,
            rope=_plain(rope),
        )

    def differences(self, other: "ModelShape") -> list[str]:
        """Return what differs, as "name: ours, not theirs"."""
        return [
            f"{name}: {getattr(self, name)}, not {getattr(other, name)}"
            for name in type(self).model_fields
            if getattr(self, name) != getattr(other, name)
        ]


def _plain(value: Any) -> Any:
    """Return nested settings as JSON has them, sorted, None left out."""
    if isinstance(value, dict):
        pairs = sorted((str(key), item) for key, item in value.items())
        return {key: _plain(item) for key, item in pairs if item is not None}
    return list(value) if isinstance(value, tuple) else value


def attention_modules(model: Any) -> list[Any]:
    """Return the attention module of each layer, in order.

    Raises:
        UnsupportedError: The model is built from other parts than Llama, Qwen2, Qwen3
            and Gemma 3 are.

    """
    decoder = getattr(model.base_model, "language_model", model.base_model)
    layers = getattr(decoder, "layers", None)
    if layers is None:
        raise UnsupportedError(f"{type(model).__name__} has no list of decoder layers")
    modules = [getattr(layer, "self_attn", None) for layer in layers]
    for index, module in enumerate(modules):
        parts = ("k_proj", "v_proj", "o_proj")
        missing = [name for name in parts if not hasattr(module, name)]
        if missing:
            raise UnsupportedError(
                f"layer {index} of {model.config.model_type} has no self_attn with "
                f"{', '.join(missing)}; calibration needs {', '.join(parts)}"
            )
        if not isinstance(module, torch.nn.Module):
            raise UnsupportedError(f"layer {index} has no attention module")
    return modules

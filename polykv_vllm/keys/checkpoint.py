# SPDX-License-Identifier: Apache-2.0
"""Key projections from the files of a model, before anything is loaded.

For the checkpoints of Llama, Qwen2, Qwen3 and Gemma 3 in the names of transformers,
unquantized. What an engine finds after loading (`attention/key_projection.py`) is the
same up to the rounding of the model's dtype.
"""

import json
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from polykv_vllm.keys.projection import KeyProjection, RotaryPairs, after_head_norm

_INDEX = "model.safetensors.index.json"
_FILE = "model.safetensors"

Tensors = Callable[[str], torch.Tensor | None]


class UnreadableCheckpointError(Exception):
    """The projections cannot be known from the files; the message says why."""


def read_checkpoint(directory: Path, hf_config: Any) -> list[KeyProjection]:
    """Return the key projection of every layer.

    Args:
        directory: With `config.json` and safetensors.
        hf_config: The model's text config in transformers' form.

    Raises:
        UnreadableCheckpointError: There are no such files, or tensors are missing or
            quantized.

    """
    with ExitStack() as stack:
        tensors = _open(directory, stack)
        layers = range(hf_config.num_hidden_layers)
        return [_read_layer(tensors, f"model.layers.{i}.", hf_config) for i in layers]


def _open(directory: Path, stack: ExitStack) -> Tensors:
    """Return what finds a tensor by name, None if there is none."""
    try:
        from safetensors import safe_open
    except ImportError as error:
        raise UnreadableCheckpointError("safetensors is not installed") from error
    index = directory / _INDEX
    names = [_FILE]
    if index.exists():
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    if missing := [name for name in names if not (directory / name).exists()]:
        raise UnreadableCheckpointError(f"{directory / missing[0]} is missing")
    place: dict[str, Any] = {}
    for name in names:
        file = stack.enter_context(safe_open(directory / name, framework="pt"))
        place |= dict.fromkeys(file.keys(), file)

    def find(name: str) -> torch.Tensor | None:
        return place[name].get_tensor(name) if name in place else None

    return find


def _weight(tensors: Tensors, name: str) -> torch.Tensor:
    weight = tensors(name)
    if weight is None or weight.dtype.itemsize < 2 or not weight.is_floating_point():
        found = "is missing" if weight is None else f"is {weight.dtype}"
        raise UnreadableCheckpointError(f"{name} {found}; 16 or 32 bits can be read")
    return weight.float()


def _read_layer(tensors: Tensors, prefix: str, hf_config: Any) -> KeyProjection:
    heads = hf_config.num_attention_heads
    head_dim = getattr(hf_config, "head_dim", None) or hf_config.hidden_size // heads
    # Gemma's norms multiply by 1 + weight.
    one = 1.0 if hf_config.model_type.startswith("gemma") else 0.0
    gain = _weight(tensors, f"{prefix}input_layernorm.weight") + one
    found = {}
    for kind in ("k", "q"):
        name = f"{prefix}self_attn.{kind}_"
        weight = _weight(tensors, f"{name}proj.weight")
        spread = (weight * gain).norm(dim=1).view(-1, head_dim)
        bias = torch.zeros_like(spread)
        if tensors(f"{name}proj.bias") is not None:
            bias = _weight(tensors, f"{name}proj.bias").view(-1, head_dim)
        if tensors(f"{name}norm.weight") is not None:
            norm = _weight(tensors, f"{name}norm.weight") + one
            bias, spread = after_head_norm(bias, spread, norm)
        found[kind] = bias, spread
    factor = getattr(hf_config, "partial_rotary_factor", None) or 1.0
    rotary = RotaryPairs(int(head_dim * factor))
    return KeyProjection(*found["k"], *found["q"], rotary)

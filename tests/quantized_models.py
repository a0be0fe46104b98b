# SPDX-License-Identifier: Apache-2.0
"""Makes 4- and 8-bit checkpoints, as published ones are stored, of a small model."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

GROUP_SIZE = 64
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_Tensors = dict[str, torch.Tensor]


def _round(weight: torch.Tensor, group: int, top: int) -> tuple[torch.Tensor, ...]:
    """Return codes in [-top, top], fp16 scales and what they stand for.

    Args:
        weight: `[outputs, inputs]`.
        group: Inputs of one scale.
        top: Largest code.

    """
    outputs, inputs = weight.shape
    rows = weight.float().view(outputs, inputs // group, group)
    scales = (rows.abs().amax(-1, keepdim=True) / top).clamp_min(1e-6).half().float()
    codes = (rows / scales).round().clamp(-top, top)
    return (
        codes.view(outputs, inputs).int(),
        scales.squeeze(-1),
        (codes * scales).view(outputs, inputs),
    )


def _pack(nibbles: torch.Tensor) -> torch.Tensor:
    """Pack eight unsigned 4-bit numbers along the last axis into an int32."""
    groups = nibbles.long().view(*nibbles.shape[:-1], -1, 8)
    words = (groups << (4 * torch.arange(8))).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).int()


def _gptq(weight: torch.Tensor) -> tuple[_Tensors, torch.Tensor]:
    """Words run along the inputs; the zero point 8 is stored as 7."""
    codes, scales, back = _round(weight, GROUP_SIZE, 7)
    outputs, inputs = weight.shape
    zeros = torch.full((inputs // GROUP_SIZE, outputs), 7)
    parts = {
        "qweight": _pack(codes + 8).T.contiguous(),
        "qzeros": _pack(zeros),
        "scales": scales.T.contiguous().half(),
        "g_idx": (torch.arange(inputs) // GROUP_SIZE).int(),
    }
    return parts, back


def _awq(weight: torch.Tensor) -> tuple[_Tensors, torch.Tensor]:
    """Words run along the outputs, in the order of AWQ's kernels."""
    codes, scales, back = _round(weight, GROUP_SIZE, 7)
    outputs, inputs = weight.shape

    def pack(rows: torch.Tensor) -> torch.Tensor:
        return _pack(rows.view(rows.shape[0], -1, 8)[..., _AWQ_ORDER].flatten(1))

    parts = {
        "qweight": pack((codes + 8).T.contiguous()),
        "qzeros": pack(torch.full((inputs // GROUP_SIZE, outputs), 8)),
        "scales": scales.T.contiguous().half(),
    }
    return parts, back


def _int8(weight: torch.Tensor) -> tuple[_Tensors, torch.Tensor]:
    """One scale for each output; activations are quantized when they come."""
    codes, scales, back = _round(weight, weight.shape[1], 127)
    return {"weight": codes.to(torch.int8), "weight_scale": scales}, back


_INT8_CONFIG = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {
                "num_bits": 8,
                "type": "int",
                "strategy": "channel",
                "symmetric": True,
                "dynamic": False,
            },
            "input_activations": {
                "num_bits": 8,
                "type": "int",
                "strategy": "token",
                "symmetric": True,
                "dynamic": True,
            },
        }
    },
}
KINDS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "gptq": (
        _gptq,
        {
            "quant_method": "gptq",
            "bits": 4,
            "group_size": GROUP_SIZE,
            "desc_act": False,
            "sym": True,
        },
    ),
    "awq": (
        _awq,
        {
            "quant_method": "awq",
            "bits": 4,
            "group_size": GROUP_SIZE,
            "zero_point": True,
            "version": "gemm",
        },
    ),
    "int8": (_int8, _INT8_CONFIG),
}
"""How a linear layer is stored, and what the model's config says of it."""


@torch.no_grad()
def quantize_checkpoint(directory: Path, model: Any, kind: str) -> None:
    """Store a saved model's linear layers in the format of `kind`, in place.

    Args:
        directory: Of the saved model.
        model: The same, of transformers; gets the weights that the codes stand for.
        kind: A key of `KINDS`.

    """
    make, config = KINDS[kind]
    file = directory / "model.safetensors"
    tensors = load_file(file)
    for name, module in model.named_modules():
        if name == "lm_head" or not isinstance(module, torch.nn.Linear):
            continue
        parts, back = make(tensors.pop(f"{name}.weight"))
        module.weight.copy_(back)
        tensors |= {f"{name}.{part}": value for part, value in parts.items()}
    save_file(tensors, file, metadata={"format": "pt"})
    path = directory / "config.json"
    fields = json.loads(path.read_text())
    path.write_text(json.dumps(fields | {"quantization_config": config}))

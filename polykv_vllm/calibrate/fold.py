# SPDX-License-Identifier: Apache-2.0
"""Multiplies the values' transform into the weights around attention: it costs nothing.

A value v = W x + b of a KV head becomes T v, and what attention makes of values becomes
T^-1 o before the output projection:

    value rows of the head        W <- T W,  b <- T b
    output columns of each of     W <- W T^-1
    its query heads

Formats that turn values by a Hadamard transform themselves, and turn the output back,
get T without its leading one, as R R = I.
"""

from typing import Any

import torch

from polykv_vllm.calibrate.artifact import Calibration
from polykv_vllm.calibrate.errors import CalibrationError
from polykv_vllm.calibrate.shape import ModelShape, attention_modules
from polykv_vllm.calibrate.transforms import hadamard, inverse
from polykv_vllm.calibrate.weights import head_digests
from polykv_vllm.formats import FormatSpec


def folded_transform(value: torch.Tensor, fmt: FormatSpec) -> torch.Tensor:
    """Return what goes into the weights, fp64, for a format.

    Args:
        value: T_V, `[..., head_dim, head_dim]`.
        fmt: Of the cache.

    """
    if fmt.value_rotation == "hadamard":
        return hadamard(value.shape[-1]) @ value.double()
    return value.double()


@torch.no_grad()
def fold_rows(rows: torch.Tensor, transform: torch.Tensor) -> None:
    """Multiply the rows (or biases) of a value projection by their heads' transforms.

    Args:
        rows: `[num_kv_heads * head_dim, hidden_size]` or `[num_kv_heads * head_dim]`,
            any float dtype; changed.
        transform: `[num_kv_heads, head_dim, head_dim]` fp64.

    """
    heads, head_dim, _ = transform.shape
    split = rows.double().view(heads, head_dim, -1)
    rows.copy_((transform @ split).view(rows.shape))


@torch.no_grad()
def fold_columns(columns: torch.Tensor, transform: torch.Tensor) -> None:
    """Multiply the columns of an output projection by their heads' inverse transforms.

    Args:
        columns: `[hidden_size, num_heads * head_dim]`, any float dtype; changed.
        transform: `[num_kv_heads, head_dim, head_dim]` fp64; query heads of a group
            are neighbours.

    """
    heads, head_dim, _ = transform.shape
    split = columns.double().view(columns.shape[0], heads, -1, head_dim)
    folded = torch.einsum("ohgd,hde->ohge", split, inverse(transform))
    columns.copy_(folded.reshape(columns.shape))


def fold_model(model: Any, calibration: Calibration, fmt: FormatSpec) -> None:
    """Fold a calibration's value transforms into a model of transformers.

    Args:
        model: A causal language model with its own weights; changed.
        calibration: Of this model.
        fmt: Of the cache that the model will write.

    Raises:
        CalibrationError: The calibration is of another model, or a layer cannot take
            it.

    """
    calibration.check_model(ModelShape.of(model.config))
    modules = attention_modules(model)
    for index, module in enumerate(modules):
        check_foldable(module, f"layer {index}", ("v_proj", "o_proj"))
        digests = model_digests(module, calibration.record.model.head_dim)
        calibration.check_heads(index, range(len(digests)), digests)
    for index, module in enumerate(modules):
        transform = folded_transform(calibration.layer(index).value, fmt)
        fold_rows(module.v_proj.weight, transform)
        if module.v_proj.bias is not None:
            fold_rows(module.v_proj.bias, transform)
        fold_columns(module.o_proj.weight, transform)


def model_digests(module: Any, head_dim: int) -> list[str]:
    """Return the digests of an attention module of transformers, by KV head."""
    key, value = module.k_proj, module.v_proj
    return head_digests((key.weight, key.bias), (value.weight, value.bias), head_dim)


def check_foldable(module: Any, name: str, projections: tuple[str, ...]) -> None:
    """Raise CalibrationError unless values are cached as the projection makes them.

    Args:
        module: Around attention.
        name: Of the layer.
        projections: Names of the value's and the output's projection.

    """
    if getattr(module, "v_norm", None) is not None:
        raise CalibrationError(
            f"{name} normalises its values (v_norm) after their projection: a "
            "transform of the values cannot be folded into weights; serve without "
            "a calibration"
        )
    for projection in projections:
        layer = getattr(module, projection, None)
        weight = getattr(layer, "weight", None)
        if (
            weight is None
            or not weight.is_floating_point()
            or weight.dtype.itemsize < 2
        ):
            kind = type(layer).__name__ if layer is not None else "missing"
            dtype = "no weight" if weight is None else f"a weight in {weight.dtype}"
            raise CalibrationError(
                f"{name}: {projection} ({kind}) has {dtype}: a transform can be folded "
                "into bf16, fp16 or fp32 weights, not into quantized ones; serve "
                "without a calibration"
            )

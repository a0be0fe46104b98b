# SPDX-License-Identifier: Apache-2.0
"""Folds a calibration's transforms of values into a model that vLLM has loaded.

Before vLLM packs the weights for its kernels, and on each rank for the heads that it
has. Layers with keys of few bits are handed the transforms of keys, which run online.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from vllm.logger import init_logger
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.models.utils import extract_layer_index

from polykv_vllm.attention.impl import PolyKVImpl, own_impls
from polykv_vllm.calibrate.artifact import (
    MODEL_FOLDER,
    RECORD_FILE,
    Calibration,
    LayerCalibration,
    load_calibration,
)
from polykv_vllm.calibrate.errors import CalibrationError
from polykv_vllm.calibrate.fold import (
    check_foldable,
    fold_columns,
    fold_rows,
    folded_transform,
)
from polykv_vllm.calibrate.shape import ModelShape
from polykv_vllm.calibrate.weights import head_digests
from polykv_vllm.keys import AUTO

logger = init_logger("vllm.polykv")


def calibration_folder(asked: str, model_config: Any) -> Path | None:
    """Return the calibration of a model that is to be served, None without one.

    Args:
        asked: The option `calibration`. A draft model is not what it is about: that has
            only what lies in its own folder.
        model_config: vLLM's, of the model.

    """
    if asked == "none":
        return None
    if asked != "auto" and getattr(model_config, "runner", None) != "draft":
        return Path(asked)
    folder = Path(model_config.model) / MODEL_FOLDER
    return folder if (folder / RECORD_FILE).exists() else None


def calibration_for(folder: Path, model_config: Any) -> Calibration:
    """Load a calibration and compare it with a model's config.

    Raises:
        CalibrationError: It cannot be used for this model.

    """
    calibration = load_calibration(folder)
    calibration.check_model(ModelShape.of(model_config.hf_config))
    if model_config.quantization is not None:
        raise CalibrationError(
            f"the weights are quantized ({model_config.quantization}): the transforms "
            f"of {folder} can be folded into bf16, fp16 or fp32 weights only; "
            'the option calibration="none" serves without'
        )
    return calibration


def apply_calibration(model: torch.nn.Module, model_config: Any) -> None:
    """Fold a calibration into the layers that have a cache of ours.

    Called when the weights are loaded and not yet packed, before anything is cached.

    Args:
        model: As vLLM's loader made it; layers that are not ours are left alone.
        model_config: vLLM's, of this model.

    Raises:
        CalibrationError: The calibration is not of these weights, or a layer cannot
            take it.

    """
    modules = dict(model.named_modules())
    impls = own_impls(modules)
    if not impls:
        return
    for impl in impls.values():
        impl.has_seen_weights = True
    asked = next(iter(impls.values())).asked_calibration
    folder = calibration_folder(asked, model_config)
    if folder is None:
        return
    calibration = calibration_for(folder, model_config)
    for fold in (False, True):  # all checks come before the first change
        for name, impl in impls.items():
            parent = modules[name.rpartition(".")[0]]
            _fold_layer(parent, name, impl, calibration, fold)
    for impl in impls.values():
        impl.calibration = calibration.digest
    logger.info(
        "Calibration: values of %d layers transformed (%s from %d tokens, %s)",
        len(impls),
        calibration.record.transform,
        calibration.record.text.tokens,
        folder,
    )


def require_calibration(layers: Mapping[str, Any], model_config: Any) -> None:
    """Check that the seam was there when the weights of these layers were loaded.

    Args:
        layers: Attention layers by name.
        model_config: vLLM's, of the served model.

    Raises:
        CalibrationError: It was not, and a calibration is to be used.

    """
    for name, layer in layers.items():
        impl = getattr(layer, "impl", None)
        if not isinstance(impl, PolyKVImpl) or impl.has_seen_weights:
            continue
        folder = calibration_folder(impl.asked_calibration, model_config)
        if folder is not None:
            raise CalibrationError(
                f"the calibration {folder} cannot be folded into {name}: its weights "
                "were loaded by a loader that does not say when they are there. "
                'Possible: calibration="none", or another --load-format'
            )


def _fold_layer(
    parent: Any, name: str, impl: PolyKVImpl, calibration: Calibration, fold: bool
) -> None:
    """Check one layer, or change its weights."""
    check_foldable(parent, name, ("qkv_proj", "o_proj"))
    for projection in ("qkv_proj", "o_proj"):
        layer = getattr(parent, projection)
        if not isinstance(layer.quant_method, UnquantizedLinearMethod):
            raise CalibrationError(
                f"{name}: {projection} is quantized "
                f"({type(layer.quant_method).__name__}): a transform can be folded "
                'into bf16, fp16 or fp32 weights; calibration="none" serves without'
            )
    qkv, output = parent.qkv_proj, parent.o_proj
    index, heads = extract_layer_index(name), _own_heads(qkv, calibration, name)
    head_dim = calibration.record.model.head_dim
    sizes = [impl.num_heads * head_dim, *[impl.num_kv_heads * head_dim] * 2]
    _, key, value = qkv.weight.data.split(sizes)
    biases: Sequence[Any] = (None, None, None)
    if qkv.bias is not None:
        biases = qkv.bias.data.split(sizes)
    layer = calibration.layer(index, heads)
    if not fold:
        found = head_digests((key, biases[1]), (value, biases[2]), head_dim)
        calibration.check_heads(index, heads, found)
        if impl.fmt.is_low_bit and impl.asked_key_treatment == AUTO:
            give_keys(name, impl, layer, calibration)
        return
    transform = folded_transform(layer.value, impl.fmt)
    fold_rows(value, transform)
    if biases[2] is not None:
        fold_rows(biases[2], transform)
    fold_columns(output.weight.data, transform)


def give_keys(
    name: str, impl: PolyKVImpl, layer: LayerCalibration, calibration: Calibration
) -> None:
    """Keep the transform of a layer's keys until its weights are final."""
    transform = layer.key_transform
    try:
        impl.check_key_transform(transform)
    except ValueError as error:
        raise CalibrationError(f"{calibration.path}: {name}: {error}") from error
    impl.calibrated_keys = transform


def _own_heads(qkv: Any, calibration: Calibration, name: str) -> list[int]:
    """Return which of the model's KV heads this rank has."""
    total = calibration.record.model.num_kv_heads
    ranks = qkv.tp_size
    if qkv.total_num_kv_heads != total or max(ranks, total) % min(ranks, total):
        raise CalibrationError(
            f"{calibration.path}: {total} KV heads; {name} has "
            f"{qkv.total_num_kv_heads} on {ranks} tensor-parallel ranks"
        )
    first = qkv.tp_rank // qkv.num_kv_head_replicas * qkv.num_kv_heads
    return list(range(first, first + qkv.num_kv_heads))

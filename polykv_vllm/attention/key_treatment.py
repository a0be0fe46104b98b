# SPDX-License-Identifier: Apache-2.0
"""Gives every layer of a loaded model its key transform."""

from collections import Counter
from collections.abc import Mapping
from typing import Any
from weakref import WeakSet

import torch
from vllm.logger import init_logger

from polykv_vllm.attention.impl import PolyKVImpl, own_impls
from polykv_vllm.attention.key_projection import UnreadableError, read_key_projection
from polykv_vllm.errors import UnsupportedError
from polykv_vllm.keys import AUTO, SCALING, KeyProjection, key_transform

logger = init_logger("vllm.polykv")

loaded_models: "WeakSet[torch.nn.Module]" = WeakSet()
"""The models of this process that have a cache of ours; the pool watches them."""


def assign_key_transforms(model: torch.nn.Module, dtype: torch.dtype) -> None:
    """Give each layer of a model its key transform.

    Called when the weights are final, before anything is cached. With
    `key_treatment=auto` a calibration's matrices come first where there are any.
    Weights that are exchanged later keep the transform: it stays exact, its scales may
    then be others than the new weights would give.

    Args:
        model: As vLLM's loader made it; layers that are not ours are left alone.
        dtype: Of its activations.

    Raises:
        UnsupportedError: The option `key_treatment` names a treatment with scales, and
            a layer's weights cannot be read.

    """
    modules = dict(model.named_modules())
    impls = own_impls(modules)
    if not impls:
        return
    loaded_models.add(model)
    asked = next(iter(impls.values())).asked_key_treatment
    rest = dict(impls)
    if asked == AUTO:
        for name, impl in impls.items():
            if impl.calibrated_keys is not None:
                impl.set_key_transform(impl.calibrated_keys)
                del rest[name]
    projections: dict[str, KeyProjection] = {}
    if rest and (asked == AUTO or asked in SCALING):
        projections, reasons = _read(modules, rest, dtype)
        _report_unreadable(asked, reasons, len(rest))
    for name, impl in rest.items():
        impl.set_key_transform(key_transform(asked, projections.get(name)))
    treatments = Counter(impl.key_transform.treatment for impl in impls.values())
    counts = ", ".join(f"{name} in {n} layers" for name, n in treatments.items())
    logger.info("Key treatment: %s (key_treatment=%s)", counts, asked)
    _warn_of_few_bits(impls)


def require_key_transforms(layers: Mapping[str, Any]) -> None:
    """Check that the seam was there when the weights of these layers were loaded.

    Args:
        layers: Attention layers by name.

    Raises:
        UnsupportedError: It was not, and the option `key_treatment` names a treatment.

    """
    open_layers = {
        name: layer.impl
        for name, layer in layers.items()
        if not getattr(getattr(layer, "impl", None), "has_final_transform", True)
    }
    if not open_layers:
        return
    asked = next(iter(open_layers.values())).asked_key_treatment
    reason = (
        f"the weights of {next(iter(open_layers))} and {len(open_layers) - 1} other "
        "layers were loaded by a loader that does not say when they are final"
    )
    if asked != AUTO:
        raise UnsupportedError(
            f"key_treatment={asked} is not possible: {reason}. Possible: auto, none, "
            "hadamard, or another --load-format"
        )
    logger.warning("Key treatment: hadamard, without scales (%s)", reason)


def _warn_of_few_bits(impls: Mapping[str, PolyKVImpl]) -> None:
    """Say what a low-bit format does without a calibration."""
    names = {
        impl.fmt.name
        for impl in impls.values()
        if impl.fmt.is_low_bit and impl.key_transform.matrices is None
    }
    if names:
        logger.warning(
            "%s has no calibration of this model: keys and values go through a "
            "Hadamard transform, which loses much more at 2 and 3 bits than calibrated "
            "transforms do. Make them with `polykv calibrate MODEL`",
            ", ".join(sorted(names)),
        )


def _read(
    modules: dict[str, torch.nn.Module], impls: dict[str, PolyKVImpl], dtype: Any
) -> tuple[dict[str, KeyProjection], dict[str, str]]:
    """Return what could be read, and the reasons why the rest could not, by layer."""
    projections, reasons = {}, {}
    for name, impl in impls.items():
        try:
            projections[name] = read_key_projection(modules, name, impl, dtype)
        except UnreadableError as error:
            reasons[name] = str(error)
    return projections, reasons


def _report_unreadable(asked: str, reasons: dict[str, str], count: int) -> None:
    """Log, or raise if a treatment was asked for, one line for each reason."""
    for reason in dict.fromkeys(reasons.values()):
        names = [name for name, found in reasons.items() if found == reason]
        layers = f"{names[0]} and {len(names) - 1} other layers"
        layers = names[0] if len(names) == 1 else layers
        if asked != AUTO:
            raise UnsupportedError(
                f"key_treatment={asked} needs the key projection of {layers}, which "
                f"cannot be read: {reason}. Possible: auto, none, hadamard"
            )
        logger.warning(
            "The keys of %s (of %d) get no scales, only the Hadamard transform, as "
            "their projection cannot be read: %s",
            layers,
            count,
            reason,
        )

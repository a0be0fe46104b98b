# SPDX-License-Identifier: Apache-2.0
"""Gives every layer of a loaded model its key transform."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from vllm.logger import init_logger

from polykv_vllm.attention.impl import PolyKVImpl
from polykv_vllm.attention.key_projection import UnreadableError, read_key_projection
from polykv_vllm.errors import UnsupportedError
from polykv_vllm.keys import (
    SCALING,
    KeyProjection,
    KeyTransform,
    choose_treatment,
    key_transform,
)

logger = init_logger("vllm.polykv")


def assign_key_transforms(model: torch.nn.Module, dtype: torch.dtype) -> None:
    """Choose the key treatment of a model and give each layer its transform.

    Called when the weights are final, before anything is cached. Weights that are
    exchanged later keep the transform: it stays exact, its scales may then be others
    than the new weights would give.

    Args:
        model: As vLLM's loader made it; layers that are not ours are left alone.
        dtype: Of its activations.

    Raises:
        UnsupportedError: The option `key_treatment` names a treatment with scales, and
            a layer's weights cannot be read.

    """
    modules = dict(model.named_modules())
    impls = {
        name: impl
        for name, module in modules.items()
        if isinstance(impl := getattr(module, "impl", None), PolyKVImpl)
    }
    if not impls:
        return
    asked = next(iter(impls.values())).asked_key_treatment
    projections: dict[str, KeyProjection] = {}
    if asked == "auto" or asked in SCALING:
        projections, reasons = _read(modules, impls, dtype)
        _report_unreadable(asked, reasons, len(impls))
    treatment, why = _choose(asked, projections, impls)
    for name, impl in impls.items():
        readable = name in projections or treatment not in SCALING
        impl.set_key_transform(
            key_transform(treatment, projections.get(name))
            if readable
            else KeyTransform()
        )
    logger.info("Key treatment: %s (%s)", treatment, why)


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
        if not getattr(getattr(layer, "impl", None), "has_chosen_transform", True)
    }
    if not open_layers:
        return
    asked = next(iter(open_layers.values())).asked_key_treatment
    reason = (
        f"the weights of {next(iter(open_layers))} and {len(open_layers) - 1} other "
        "layers were loaded by a loader that does not say when they are final"
    )
    if asked != "auto":
        raise UnsupportedError(
            f"key_treatment={asked} is not possible: {reason}. Possible: auto, none, "
            "or another --load-format"
        )
    logger.warning("Key treatment: none (%s)", reason)


def _read(
    modules: dict[str, torch.nn.Module], impls: dict[str, PolyKVImpl], dtype: Any
) -> tuple[dict[str, KeyProjection], dict[str, str]]:
    """Return what could be read, and the reasons why the rest could not, by layer."""
    projections, reasons = {}, {}
    with torch.no_grad():
        for name, impl in impls.items():
            try:
                projection = read_key_projection(modules, name, impl, dtype)
            except UnreadableError as error:
                reasons[name] = str(error)
                continue
            projections[name] = projection
    return projections, reasons


def _report_unreadable(asked: str, reasons: dict[str, str], count: int) -> None:
    """Log, or raise if a treatment was asked for, one line for each reason."""
    for reason in dict.fromkeys(reasons.values()):
        names = [name for name, found in reasons.items() if found == reason]
        layers = f"{names[0]} and {len(names) - 1} other layers"
        layers = names[0] if len(names) == 1 else layers
        if asked != "auto":
            raise UnsupportedError(
                f"key_treatment={asked} needs the key projection of {layers}, which "
                f"cannot be read: {reason}. Possible: auto, none, hadamard"
            )
        logger.warning(
            "The keys of %s (of %d) get no treatment with scales, as their projection "
            "cannot be read: %s",
            layers,
            count,
            reason,
        )


def _choose(
    asked: str, projections: dict[str, KeyProjection], impls: dict[str, PolyKVImpl]
) -> tuple[str, str]:
    """Return the model's treatment, and why, the same on every worker."""
    if asked != "auto":
        return asked, "as the option key_treatment says"
    whole = _gather(list(projections.values()))
    if not whole:
        return "none", "no layer's key projection can be read"
    fmt = next(iter(impls.values())).fmt
    return choose_treatment(whole, fmt), (
        f"chosen for {fmt.name} from the weights of {len(whole)} layers; the largest "
        f"key bias is {_largest_bias(whole):.1f} times its head's spread"
    )


def _largest_bias(projections: Sequence[KeyProjection]) -> float:
    def ratio(projection: KeyProjection) -> float:
        spread = projection.key_spread.square().mean(-1, keepdim=True).sqrt()
        return float((projection.key_bias.abs() / spread.clamp(min=1e-30)).max())

    return max(map(ratio, projections))


def _gather(projections: list[KeyProjection]) -> list[KeyProjection]:
    """Return the layers of all workers with all their heads.

    Tensor parallel workers have some heads of each layer, pipeline stages some layers.
    """
    from vllm.distributed import get_pp_group, get_tp_group

    shards = _from_all(projections, get_tp_group())
    layers = [_join(parts) for parts in zip(*shards, strict=True)]
    return [layer for stage in _from_all(layers, get_pp_group()) for layer in stage]


def _from_all(
    projections: list[KeyProjection], group: Any
) -> list[list[KeyProjection]]:
    if group.world_size == 1:
        return [projections]
    out: list[Any] = [None] * group.world_size
    torch.distributed.all_gather_object(out, projections, group=group.cpu_group)
    return out


def _join(parts: Sequence[KeyProjection]) -> KeyProjection:
    """Put the heads of several workers into one projection."""

    def heads(name: str) -> torch.Tensor:
        return torch.cat([getattr(part, name) for part in parts])

    return KeyProjection(
        heads("key_bias"),
        heads("key_spread"),
        heads("query_bias"),
        heads("query_spread"),
        parts[0].rotary,
    )

# SPDX-License-Identifier: Apache-2.0
"""From the name of a treatment and a layer's weights to its transform."""

from polykv_vllm.keys.projection import KeyProjection
from polykv_vllm.keys.scales import channel_scales
from polykv_vllm.keys.transform import TREATMENTS, KeyTransform

SCALING: tuple[str, ...] = ("channel_scale", "channel_scale_hadamard")
"""Treatments that need to know a layer's weights."""


def key_transform(treatment: str, projection: KeyProjection | None) -> KeyTransform:
    """Return the transform of one layer.

    Args:
        treatment: One of `TREATMENTS`.
        projection: What the layer's weights say; None suffices without scales.

    Raises:
        ValueError: There is no such treatment, or it needs the projection.

    """
    if treatment not in TREATMENTS:
        raise ValueError(
            f"unknown key treatment {treatment!r}; possible: {', '.join(TREATMENTS)}"
        )
    rotate = treatment.endswith("hadamard")
    if treatment not in SCALING:
        return KeyTransform(rotate=rotate)
    if projection is None:
        raise ValueError(f"the key treatment {treatment} needs a layer's projection")
    return KeyTransform(channel_scales(projection), rotate)

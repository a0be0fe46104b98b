# SPDX-License-Identifier: Apache-2.0
"""From the name of a treatment and a layer's weights to its transform."""

from polykv_vllm.keys.projection import KeyProjection
from polykv_vllm.keys.scales import channel_scales
from polykv_vllm.keys.transform import TREATMENTS, KeyTransform

AUTO = "auto"
"""The default: what measured best on every model (docs/keys.md)."""

SCALING: tuple[str, ...] = ("channel_scale", "channel_scale_hadamard")
"""Treatments that need to know a layer's weights."""


def key_transform(
    treatment: str, projection: KeyProjection | None = None
) -> KeyTransform:
    """Return the transform of one layer.

    Args:
        treatment: One of `TREATMENTS`, or `AUTO`: scales and Hadamard transform, the
            transform alone where the projection is not known.
        projection: What the layer's weights say; None suffices without scales.

    Raises:
        ValueError: There is no such treatment, or it needs the projection.

    """
    if treatment == AUTO:
        treatment = "hadamard" if projection is None else "channel_scale_hadamard"
    if treatment not in TREATMENTS:
        raise ValueError(
            f"there is no key treatment {treatment!r}; there are: "
            f"{', '.join((AUTO, *TREATMENTS))}"
        )
    rotate = treatment.endswith("hadamard")
    if treatment not in SCALING:
        return KeyTransform(rotate=rotate)
    if projection is None:
        raise ValueError(f"the key treatment {treatment} needs a layer's projection")
    return KeyTransform(channel_scales(projection), rotate)

# SPDX-License-Identifier: Apache-2.0
"""From statistics to the transforms of a whole model, by name."""

from typing import Literal, NamedTuple

import torch

from polykv_vllm.calibrate import transforms
from polykv_vllm.calibrate.statistics import Statistics
from polykv_vllm.calibrate.transforms import DAMPING

TransformName = Literal["identity", "random", "hadamard", "oscar", "wush", "wush_a"]
TRANSFORMS: tuple[TransformName, ...] = (
    "identity",
    "random",
    "hadamard",
    "oscar",
    "wush",
    "wush_a",
)


class Transforms(NamedTuple):
    """Transforms of a model, fp64.

    Attributes:
        key: `[num_layers, num_kv_heads, head_dim, head_dim]`, T of the keys, for
            columns: a row k becomes `(k - key_center) @ T.mT`.
        value: T of the values, shaped likewise.
        key_center: `[num_layers, num_kv_heads, head_dim]`, what is subtracted from
            every key; zeros for nothing.

    """

    key: torch.Tensor
    value: torch.Tensor
    key_center: torch.Tensor


def build_transforms(
    name: str,
    statistics: Statistics,
    damping: float = DAMPING,
    seed: int = 0,
    center_keys: bool = True,
) -> Transforms:
    """Return the transforms called `name`.

    With centred keys the mean key of the text is subtracted from every key before it is
    transformed. A query's products with all keys then lose one and the same number, of
    which a softmax knows nothing, and codes need not spend their range on it.

    Args:
        name: One of `TRANSFORMS`.
        statistics: Of a calibration text.
        damping: See `transforms.wush`.
        seed: Of the random rotations.
        center_keys: Subtract the mean key.

    Raises:
        ValueError: There is no such transform, or the statistics lack what it needs.

    """
    center = statistics.key_mean()
    if not center_keys:
        center = torch.zeros_like(center)
    return Transforms(
        *_matrices(name, statistics, damping, seed, center_keys), key_center=center
    )


def _matrices(
    name: str, statistics: Statistics, damping: float, seed: int, center_keys: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return T of the keys and of the values."""
    key = statistics.centred_keys() if center_keys else statistics.stacked("key")
    value = statistics.stacked("value")
    shape = tuple(key.shape)
    match name:
        case "identity":
            return transforms.identity(shape), transforms.identity(shape)
        case "random":
            return (
                transforms.random_orthogonal(shape, 2 * seed),
                transforms.random_orthogonal(shape, 2 * seed + 1),
            )
        case "hadamard":
            matrix = transforms.hadamard(shape[-1]).expand(shape).clone()
            return matrix, matrix.clone()
        case "oscar":
            return (
                transforms.oscar(statistics.stacked("query")),
                transforms.oscar(statistics.stacked("value_drawn")),
            )
        case "wush":
            return (
                transforms.wush(key, statistics.stacked("query"), damping),
                transforms.wush(value, statistics.stacked("output"), damping),
            )
        case "wush_a":
            if not statistics.aware_sequences:
                raise ValueError(
                    "wush_a needs statistics that know the attention: collect them "
                    "with aware=True"
                )
            return (
                transforms.wush(key, statistics.stacked("aware_query"), damping),
                transforms.wush(value, statistics.stacked("aware_output"), damping),
            )
    raise ValueError(
        f"there is no transform {name!r}; there are: {', '.join(TRANSFORMS)}"
    )

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
    """Transforms of a model; each `[num_layers, num_kv_heads, head_dim, head_dim]`.

    Attributes:
        key: T of the keys, for columns: a row k becomes `k @ T.mT`.
        value: T of the values.

    """

    key: torch.Tensor
    value: torch.Tensor


def build_transforms(
    name: str, statistics: Statistics, damping: float = DAMPING, seed: int = 0
) -> Transforms:
    """Return the transforms called `name`, fp64.

    Args:
        name: One of `TRANSFORMS`.
        statistics: Of a calibration text.
        damping: See `transforms.wush`.
        seed: Of the random rotations.

    Raises:
        ValueError: There is no such transform, or the statistics lack what it needs.

    """
    key, value = statistics.stacked("key"), statistics.stacked("value")
    shape = tuple(key.shape)
    match name:
        case "identity":
            return Transforms(transforms.identity(shape), transforms.identity(shape))
        case "random":
            return Transforms(
                transforms.random_orthogonal(shape, 2 * seed),
                transforms.random_orthogonal(shape, 2 * seed + 1),
            )
        case "hadamard":
            matrix = transforms.hadamard(shape[-1]).expand(shape).clone()
            return Transforms(matrix, matrix.clone())
        case "oscar":
            return Transforms(
                transforms.oscar(statistics.stacked("query")),
                transforms.oscar(statistics.stacked("value_drawn")),
            )
        case "wush":
            return Transforms(
                transforms.wush(key, statistics.stacked("query"), damping),
                transforms.wush(value, statistics.stacked("output"), damping),
            )
        case "wush_a":
            if not statistics.aware_sequences:
                raise ValueError(
                    "wush_a needs statistics that know the attention: collect them "
                    "with aware=True"
                )
            return Transforms(
                transforms.wush(key, statistics.stacked("aware_query"), damping),
                transforms.wush(value, statistics.stacked("aware_output"), damping),
            )
    raise ValueError(
        f"there is no transform {name!r}; there are: {', '.join(TRANSFORMS)}"
    )

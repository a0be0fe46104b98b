# SPDX-License-Identifier: Apache-2.0
"""The key treatment of a transformers model, made as the engine makes it."""

from typing import Any

from polykv_vllm.hf.projections import read_projections
from polykv_vllm.keys import AUTO, TREATMENTS, KeyTransform, key_transform


def key_transforms(model: Any, treatment: str = AUTO) -> list[KeyTransform] | None:
    """Return the transform of every layer's keys; None for the treatment "none".

    Args:
        model: A causal language model of transformers.
        treatment: One of `keys.TREATMENTS`, or `AUTO`.

    Raises:
        UnsupportedError: The weights are needed and not found.
        ValueError: There is no such treatment.

    """
    if treatment not in (AUTO, *TREATMENTS):
        raise ValueError(
            f"there is no key treatment {treatment!r}; there are: "
            f"{', '.join((AUTO, *TREATMENTS))}"
        )
    if treatment == "none":
        return None
    return [key_transform(treatment, each) for each in read_projections(model)]

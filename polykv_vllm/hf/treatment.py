# SPDX-License-Identifier: Apache-2.0
"""The key treatment of a transformers model, chosen as the engine chooses it."""

from typing import Any

from polykv_vllm.formats import FormatSpec
from polykv_vllm.hf.projections import read_projections
from polykv_vllm.keys import (
    TREATMENTS,
    KeyTransform,
    choose_treatment,
    key_transform,
)

AUTO = "auto"


def key_transforms(
    model: Any, fmt: FormatSpec, treatment: str = AUTO
) -> list[KeyTransform] | None:
    """Return the transform of every layer's keys; None for the treatment "none".

    Args:
        model: A causal language model of transformers.
        fmt: The format of its cache.
        treatment: One of `keys.TREATMENTS`, or "auto": what the weights ask for.

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
    projections = read_projections(model)
    if treatment == AUTO:
        treatment = choose_treatment(projections, fmt)
    if treatment == "none":
        return None
    return [key_transform(treatment, each) for each in projections]

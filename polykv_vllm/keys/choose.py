# SPDX-License-Identifier: Apache-2.0
"""Which treatment the keys of a model get."""

from collections.abc import Sequence

import torch

from polykv_vllm.formats import FormatSpec
from polykv_vllm.keys.projection import KeyProjection

_LARGE_BIAS = 8.0


def largest_bias(projection: KeyProjection) -> float:
    """Return the largest key bias in units of its head's RMS spread."""
    spread = projection.key_spread.square().mean(-1, keepdim=True).sqrt()
    ratio = projection.key_bias.abs() / spread.clamp(min=1e-30)
    return float(torch.max(ratio))


def choose_treatment(projections: Sequence[KeyProjection], fmt: FormatSpec) -> str:
    """Return the treatment of a model, one of `TREATMENTS`, from all its layers."""
    del fmt
    is_large = any(largest_bias(p) > _LARGE_BIAS for p in projections)
    return "channel_scale" if is_large else "none"

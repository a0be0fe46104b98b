# SPDX-License-Identifier: Apache-2.0
"""What the weights of a layer say about its keys, without any text."""

from dataclasses import dataclass
from typing import Literal

import torch


@dataclass(frozen=True)
class RotaryPairs:
    """Which channels RoPE rotates into each other.

    Attributes:
        dim: Channels that are rotated, the first ones of the head.
        style: "neox" pairs channel i with i + dim/2, "gptj" 2i with 2i + 1.

    """

    dim: int
    style: Literal["neox", "gptj"] = "neox"


@dataclass(frozen=True)
class KeyProjection:
    """Keys and queries of one layer as they leave the projection (and its norm).

    For inputs of unit variance a channel's values scatter around the bias by the norm
    of the weight's row, the gain of the norm before the projection multiplied in. A
    norm of the heads (qk-norm) is already applied to bias and spread.

    Attributes:
        key_bias: `[num_kv_heads, head_dim]` fp32.
        key_spread: `[num_kv_heads, head_dim]` fp32.
        query_bias: `[num_heads, head_dim]` fp32.
        query_spread: `[num_heads, head_dim]` fp32.
        rotary: What RoPE does between the projection and the cache; None without it.

    """

    key_bias: torch.Tensor
    key_spread: torch.Tensor
    query_bias: torch.Tensor
    query_spread: torch.Tensor
    rotary: RotaryPairs | None


def after_head_norm(
    bias: torch.Tensor,
    spread: torch.Tensor,
    gain: torch.Tensor,
    shift: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return bias and spread after a norm of the heads (qk-norm).

    It divides by the root mean square of a head: here, by the one that is expected for
    inputs of unit variance.

    Args:
        bias: `[heads, head_dim]` fp32.
        spread: `[heads, head_dim]` fp32.
        gain: `[head_dim]` fp32, what the norm multiplies by.
        shift: `[head_dim]` fp32, what it adds.

    """
    mean_square = (bias.square() + spread.square()).mean(-1, keepdim=True)
    factor = gain * mean_square.clamp(min=1e-30).rsqrt()
    bias = bias * factor
    return bias if shift is None else bias + shift, spread * factor.abs()

# SPDX-License-Identifier: Apache-2.0
"""Scales of the key channels, from the weights alone."""

import torch

from polykv_vllm.keys.projection import KeyProjection, RotaryPairs


def channel_scales(projection: KeyProjection) -> torch.Tensor:
    """Return `[num_kv_heads, head_dim]` fp32, positive, geometric mean 1 per head.

    The root mean square of a channel; RoPE turns the two channels of a pair into each
    other, so they have one scale.
    """
    square = projection.key_bias.square() + projection.key_spread.square()
    if projection.rotary is not None:
        square = _pair_means(square, projection.rotary)
    largest = square.amax(-1, keepdim=True).clamp(min=1e-30)
    scales = square.clamp(min=1e-12 * largest).sqrt()
    return scales / scales.log().mean(-1, keepdim=True).exp()


def _pair_means(x: torch.Tensor, rotary: RotaryPairs) -> torch.Tensor:
    head = x[..., : rotary.dim]
    if rotary.style == "neox":
        pairs = head.unflatten(-1, (2, rotary.dim // 2))
        mean = pairs.mean(-2, keepdim=True).expand_as(pairs)
    else:
        pairs = head.unflatten(-1, (rotary.dim // 2, 2))
        mean = pairs.mean(-1, keepdim=True).expand_as(pairs)
    return torch.cat((mean.flatten(-2), x[..., rotary.dim :]), -1)

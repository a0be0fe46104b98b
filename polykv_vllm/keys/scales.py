# SPDX-License-Identifier: Apache-2.0
"""Channel scales from the weights alone: no text, no forward pass.

With an error of one size in every channel of `T k`, `T = R diag(1/s)`, the mean square
error of a score is proportional to `sum(s^2 q^2) * sum(k^2 / s^2)` over the channels;
its minimum is at `s^2 = k / q` (Cauchy-Schwarz). That is the diagonal case of WUSH
(arXiv 2609.38121, equation 1). `k` and `q` are magnitudes of keys and queries as the
projection makes them.

RoPE turns the two channels of a pair into each other, so a pair has one scale. A bias
adds the same to every key before RoPE, but how it lies in the pair depends on the
position: all of it counts in both channels, beside the peak of what scatters around it.
"""

import torch

from polykv_vllm.keys.projection import KeyProjection, RotaryPairs

PEAK_SPREADS = 3.0
"""Standard deviations around the bias that a key is expected to reach."""

SMALLEST = 1e-2
"""Magnitudes below this share of their head's root mean square count as this."""


def channel_scales(projection: KeyProjection) -> torch.Tensor:
    """Return the scales of a layer's key channels.

    Args:
        projection: What the weights say about the layer.

    Returns:
        `[num_kv_heads, head_dim]` fp32, of geometric mean 1 in every head.

    """
    rotary = projection.rotary
    num_kv_heads, head_dim = projection.key_bias.shape
    bias = _pair_rms(projection.key_bias, rotary)
    if rotary is not None:
        bias[..., : rotary.dim] *= 2**0.5
    key = bias + PEAK_SPREADS * _pair_rms(projection.key_spread, rotary)
    query2 = projection.query_bias.square() + projection.query_spread.square()
    query = query2.view(num_kv_heads, -1, head_dim).mean(1).sqrt()
    scales = (_floored(key) / _floored(_pair_rms(query, rotary))).sqrt()
    return scales / scales.log().mean(-1, keepdim=True).exp()


def _pair_rms(magnitude: torch.Tensor, rotary: RotaryPairs | None) -> torch.Tensor:
    """Give both channels of each RoPE pair the root of their mean square."""
    if rotary is None:
        return magnitude.abs()
    turned = magnitude[..., : rotary.dim].square()
    axis = -2 if rotary.style == "neox" else -1
    pairs = turned.unflatten(-1, (2, -1) if rotary.style == "neox" else (-1, 2))
    mean = pairs.mean(axis, keepdim=True).expand_as(pairs).flatten(-2)
    return torch.cat((mean.sqrt(), magnitude[..., rotary.dim :].abs()), -1)


def _floored(magnitude: torch.Tensor) -> torch.Tensor:
    """Raise channels that the weights leave (nearly) empty: 0/0 is no scale.

    Gemma 3 270M has such channels in most of its layers.
    """
    rms = magnitude.square().mean(-1, keepdim=True).sqrt()
    # In a head that is empty as a whole, all channels count alike.
    floor = (SMALLEST * rms).clamp(min=torch.finfo(torch.float32).tiny)
    return torch.maximum(magnitude, floor)

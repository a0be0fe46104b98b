# SPDX-License-Identifier: Apache-2.0
"""Scales from weights: their properties, and that they lower the error of scores."""

import pytest
import torch

from polykv_vllm.formats import get_format
from polykv_vllm.keys import KeyProjection, KeyTransform, RotaryPairs, channel_scales
from polykv_vllm.reference.quantize import dequantize_key, quantize_key

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 64


def projection(
    *, bias: float = 0.0, empty: bool = False, rotary: RotaryPairs | None = None
) -> KeyProjection:
    torch.manual_seed(0)
    spread = torch.rand(KV_HEADS, HEAD_DIM) + 0.5
    if empty:
        spread[0, [3, 35]] = 0
        spread[1] = 0
    key_bias = torch.zeros(KV_HEADS, HEAD_DIM)
    key_bias[:, 5] = bias
    query_spread = torch.rand(HEADS, HEAD_DIM) + 0.5
    query_bias = torch.zeros(HEADS, HEAD_DIM)
    return KeyProjection(key_bias, spread, query_bias, query_spread, rotary)


@pytest.mark.parametrize(
    ("rotary", "partners"),
    [
        (RotaryPairs(64), [(0, 32), (31, 63)]),
        (RotaryPairs(64, "gptj"), [(0, 1), (62, 63)]),
        (RotaryPairs(32), [(0, 16), (15, 31)]),
    ],
)
def test_the_channels_of_a_pair_have_one_scale(
    rotary: RotaryPairs, partners: list[tuple[int, int]]
) -> None:
    scales = channel_scales(projection(bias=100, rotary=rotary))
    for one, other in partners:
        assert torch.equal(scales[:, one], scales[:, other])
    # Beyond `dim` nothing is turned, so nothing is shared.
    free = scales[:, rotary.dim :]
    assert free.unique().numel() == free.numel()


@pytest.mark.parametrize("empty", [False, True])
def test_scales_are_fit_for_a_transform(empty: bool) -> None:
    scales = channel_scales(projection(bias=300, empty=empty, rotary=RotaryPairs(64)))
    KeyTransform(scales)  # refuses what is not positive and finite
    torch.testing.assert_close(scales.log().mean(-1), torch.zeros(KV_HEADS))


def test_larger_keys_and_smaller_queries_have_larger_scales() -> None:
    plain = projection()
    larger = KeyProjection(
        plain.key_bias,
        plain.key_spread * torch.tensor([4.0] + [1.0] * 63),
        plain.query_bias,
        plain.query_spread * torch.tensor([1.0, 1 / 4] + [1.0] * 62),
        None,
    )
    ratio = channel_scales(larger) / channel_scales(plain)
    torch.testing.assert_close(ratio[:, :2] / ratio[:, 2:3], torch.full((2, 2), 2.0))


def test_scores_of_biased_keys_keep_their_differences() -> None:
    """The error that matters is that of scores; seven bits, a bias of 300."""
    model = projection(bias=300)
    fmt = get_format("polykv_k7v4")
    keys = model.key_bias + torch.randn(256, KV_HEADS, HEAD_DIM) * model.key_spread
    queries = torch.randn(64, HEADS, HEAD_DIM) * model.query_spread
    group = HEADS // KV_HEADS
    exact = torch.einsum("qhd,khd->hqk", queries, keys.repeat_interleave(group, 1))

    def error(transform: KeyTransform) -> float:
        stored = dequantize_key(quantize_key(transform.keys(keys), fmt))
        restored = transform.restore_keys(stored).repeat_interleave(group, 1)
        scores = torch.einsum("qhd,khd->hqk", queries, restored)
        return float((scores - exact).square().mean().sqrt())

    scales = channel_scales(model)
    treated = error(KeyTransform(scales, rotate=True))
    assert treated < 0.1 * error(KeyTransform())
    assert treated < 0.5 * error(KeyTransform(rotate=True))
    assert treated < error(KeyTransform(scales))

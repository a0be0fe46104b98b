# SPDX-License-Identifier: Apache-2.0
"""The oracle's attention against torch's own, in fp64."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from polykv_vllm.reference.attention import attention


def expected(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    window: int,
) -> torch.Tensor:
    """Attention with an explicit mask, heads repeated for the group."""
    group = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(group, 1).transpose(0, 1) for x in (key, value))
    length, count = key.shape[1], query.shape[0]
    mask = torch.zeros(count, length, dtype=torch.bool)
    for row in range(count):
        position = length - count + row
        first = 0 if window < 0 else max(0, position + 1 - window)
        mask[row, first : position + 1] = True
    out = scaled_dot_product_attention(
        query.transpose(0, 1), key, value, attn_mask=mask, scale=scale
    )
    return out.transpose(0, 1)


@pytest.mark.parametrize("group", [1, 3, 4])
@pytest.mark.parametrize(("queries", "length"), [(1, 1), (1, 40), (40, 40), (7, 33)])
@pytest.mark.parametrize("window", [-1, 1, 5, 100])
def test_equals_torch(group: int, queries: int, length: int, window: int) -> None:
    query = torch.randn(queries, 2 * group, 64, dtype=torch.float64)
    key, value = torch.randn(2, length, 2, 64, dtype=torch.float64)
    got = attention(query, key, value, 0.2, window)
    # Two orders of summation in fp64: a few hundred eps of values near one.
    torch.testing.assert_close(
        got, expected(query, key, value, 0.2, window), rtol=0, atol=1e-13
    )


def test_alibi_is_a_mask() -> None:
    """torch has the bias as a mask; slopes are those of arXiv 2108.12409."""
    query = torch.randn(9, 4, 64, dtype=torch.float64)
    key, value = torch.randn(2, 30, 4, 64, dtype=torch.float64)
    slopes = 2.0 ** -torch.arange(2, 10, 2)
    distance = torch.arange(30) - torch.arange(21, 30).unsqueeze(1)
    mask = (slopes[:, None, None] * distance).double()
    mask = mask.masked_fill(distance > 0, -torch.inf)
    rows = (x.transpose(0, 1) for x in (query, key, value))
    out = scaled_dot_product_attention(*rows, attn_mask=mask, scale=0.2)
    got = attention(query, key, value, 0.2, alibi_slopes=slopes)
    torch.testing.assert_close(got, out.transpose(0, 1), rtol=0, atol=1e-13)


def test_a_sink_is_a_token_without_a_value() -> None:
    query = torch.randn(1, 1, 64, dtype=torch.float64)
    key, value = torch.randn(2, 12, 1, 64, dtype=torch.float64)
    # The first token becomes the sink: its logit is kept, its value is not.
    sink = (query[0, 0] @ key[0, 0] * 0.2).reshape(1)
    value[0] = 0
    got = attention(query, key[1:], value[1:], 0.2, sinks=sink)
    whole = attention(query, key, value, 0.2)
    torch.testing.assert_close(got, whole, rtol=0, atol=1e-13)


def test_soft_cap() -> None:
    query = 5 * torch.randn(1, 1, 64, dtype=torch.float64)
    key, value = torch.randn(2, 12, 1, 64, dtype=torch.float64)
    logit = 3 * torch.tanh(key[:, 0] @ query[0, 0] * 0.2 / 3)
    expected = (logit.exp() / logit.exp().sum()) @ value[:, 0]
    got = attention(query, key, value, 0.2, soft_cap=3.0)
    torch.testing.assert_close(got[0, 0], expected, rtol=0, atol=1e-13)


def test_nan_outside_the_window_is_not_seen() -> None:
    query = torch.randn(3, 2, 64)
    key, value = torch.randn(2, 20, 1, 64)
    clean = attention(query, key, value, 0.1, 4)
    key[:14] = value[:14] = torch.nan
    assert torch.equal(attention(query, key, value, 0.1, 4), clean)


def test_nan_inside_the_window_is_seen() -> None:
    query = torch.randn(1, 2, 64)
    key, value = torch.randn(2, 20, 1, 64)
    key[10] = torch.nan
    assert attention(query, key, value, 0.1).isnan().all()

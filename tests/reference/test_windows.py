# SPDX-License-Identifier: Apache-2.0
"""Windows of full precision: which pairs, and the same softmax as one tier."""

import pytest
import torch

from polykv_vllm.reference.windows import Windows, windowed_attention

SHAPE = (2, 300, 16)  # KV heads, tokens, head size


def states(seed: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    heads, tokens, dim = SHAPE
    query = torch.randn(3 * heads, tokens, dim, generator=generator)
    others = [torch.randn(SHAPE, generator=generator) for _ in range(4)]
    return (query, *others)


def by_definition(
    query: torch.Tensor,
    exact: tuple[torch.Tensor, torch.Tensor],
    coarse: tuple[torch.Tensor, torch.Tensor],
    is_full: torch.Tensor,
    sliding: int | None,
) -> torch.Tensor:
    """One query and key at a time, which pairs are full given as a table."""
    tokens = query.shape[1]
    output = torch.zeros_like(query)
    for head in range(query.shape[0]):
        for t in range(tokens):
            first = 0 if sliding is None else max(0, t + 1 - sliding)
            full = is_full[t, first : t + 1, None]
            own = head // 3
            key, value = (
                torch.where(full, fine[own, first : t + 1], rough[own, first : t + 1])
                for fine, rough in zip(exact, coarse, strict=True)
            )
            weights = (key @ query[head, t] * 0.25).softmax(0)
            output[head, t] = weights @ value
    return output


@pytest.mark.parametrize("sliding", [None, 50])
@pytest.mark.parametrize(
    "windows",
    [
        Windows(),
        Windows(4, 32),
        Windows(0, 7),
        Windows(16, 0),
        Windows(400, 0),
        Windows(4, 32, 16),
        Windows(0, 32, 8),
    ],
    ids=str,
)
def test_attention_is_that_of_the_definition(
    windows: Windows, sliding: int | None
) -> None:
    query, key, value, rough_key, rough_value = (s[:, :280] for s in states(0))
    positions = torch.arange(280)
    table = windows.is_full(positions, positions)
    pairs = ((key, value), (rough_key, rough_value))
    found = windowed_attention(query, key, value, pairs[1], 0.25, windows, sliding)
    expected = by_definition(query, *pairs, table, sliding)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_on_arrival_the_newest_are_full() -> None:
    table = Windows(2, 3).is_full(torch.arange(10), torch.arange(10))
    assert table[9].nonzero()[:, 0].tolist() == [0, 1, 7, 8, 9]
    assert table[3].nonzero()[:, 0].tolist()[:4] == [0, 1, 2, 3]
    assert not Windows().is_full(torch.arange(10), torch.arange(10)).triu(1).all()


def test_the_flush_schedule_is_the_published_one() -> None:
    """Algorithm 2, step by step: whole chunks, after they were attended to."""
    windows = Windows(sink_tokens=16, recent_tokens=32, flush_tokens=16)
    quantized_to = 0
    for chunk in range(20):
        positions = torch.arange(16 * chunk, 16 * (chunk + 1))
        begins = windows.first_recent(positions)
        assert begins.tolist() == [max(quantized_to, 16)] * 16
        length = 16 * (chunk + 1)
        start = max(quantized_to, 16)
        quantized_to = start + max(0, length - 32 - start) // 16 * 16
    newest = positions[0] - begins[0]
    assert 32 <= newest <= 32 + 15

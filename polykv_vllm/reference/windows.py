# SPDX-License-Identifier: Apache-2.0
"""Attention to quantized keys and values with windows of full precision.

A query sees the first `sink_tokens` and the newest tokens as they were, the others as
the cache holds them, in one softmax. Two schedules say which tokens are the newest:

    on arrival   the last `recent_tokens`, the query's own included
    flushed      the published one: tokens leave the window `flush_tokens` at a time, so
    it
                 has recent_tokens to recent_tokens + flush_tokens - 1, and the tokens
                 of the query's own chunk (arXiv 2609.38121, algorithm 2)
"""

from dataclasses import dataclass

import torch

_QUERIES = 256  # at once: bounds the scores' memory


@dataclass(frozen=True)
class Windows:
    """Which tokens a query sees in full precision.

    Attributes:
        sink_tokens: First tokens of the sequence.
        recent_tokens: Newest tokens.
        flush_tokens: Tokens that are quantized at once, and read at once; None: each
            when it arrives.

    """

    sink_tokens: int = 0
    recent_tokens: int = 0
    flush_tokens: int | None = None

    def first_recent(self, positions: torch.Tensor) -> torch.Tensor:
        """Return, for queries at `positions`, where their newest tokens begin."""
        if self.flush_tokens is None:
            return (positions + 1 - self.recent_tokens).clamp(min=0)
        size = self.flush_tokens
        before = positions // size * size  # tokens when the query's chunk came
        full = (before - self.recent_tokens - self.sink_tokens).clamp(min=0)
        return self.sink_tokens + full // size * size

    def is_full(self, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """Return `[queries, keys]` bool: which pairs are computed in full precision."""
        recent = keys >= self.first_recent(queries).unsqueeze(-1)
        return recent | (keys < self.sink_tokens)


def windowed_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    quantized: tuple[torch.Tensor, torch.Tensor],
    scale: float,
    windows: Windows,
    sliding_window: int | None = None,
) -> torch.Tensor:
    """Attend causally over one sequence, all of it new.

    Args:
        query: `[num_heads, tokens, head_dim]` fp32.
        key: `[num_kv_heads, tokens, head_dim]` fp32, as it was.
        value: Like `key`.
        quantized: Key and value as the cache gives them back, in the model's own basis.
        scale: Of the softmax.
        windows: What is seen in full precision.
        sliding_window: Keys that a query sees, itself included; None for all.

    Returns:
        `[num_heads, tokens, head_dim]` fp32.

    """
    num_kv_heads, tokens, head_dim = key.shape
    grouped = query.reshape(num_kv_heads, -1, tokens, head_dim) * scale
    output = torch.empty_like(grouped)
    for begin in range(0, tokens, _QUERIES):
        rows = torch.arange(begin, min(begin + _QUERIES, tokens))
        output[:, :, rows] = _rows(
            grouped[:, :, rows], rows, (key, value), quantized, windows, sliding_window
        )
    return output.view(query.shape)


def _rows(
    query: torch.Tensor,
    rows: torch.Tensor,
    exact: tuple[torch.Tensor, torch.Tensor],
    quantized: tuple[torch.Tensor, torch.Tensor],
    windows: Windows,
    sliding_window: int | None,
) -> torch.Tensor:
    """Attend with some queries `[num_kv_heads, group, rows, head_dim]`."""
    end = int(rows[-1]) + 1
    keys = torch.arange(end)
    key, value = (states[:, None, :end] for states in exact)
    coarse_key, coarse_value = (states[:, None, :end] for states in quantized)
    is_full = windows.is_full(rows, keys)
    # Outside these two stretches no key is seen in full precision.
    low = min(int(windows.first_recent(rows).min()), end)
    stretches = [slice(0, min(windows.sink_tokens, low)), slice(low, end)]
    scores = query @ coarse_key.mT
    for part in stretches:
        fine = query @ key[:, :, part].mT
        scores[..., part] = torch.where(is_full[:, part], fine, scores[..., part])
    hidden = keys > rows.unsqueeze(-1)
    if sliding_window is not None:
        hidden |= keys <= rows.unsqueeze(-1) - sliding_window
    weights = scores.masked_fill_(hidden, -torch.inf).softmax(-1)
    output = weights @ coarse_value
    for part in stretches:
        error = value[:, :, part] - coarse_value[:, :, part]
        output += (weights[..., part] * is_full[:, part]) @ error
    return output

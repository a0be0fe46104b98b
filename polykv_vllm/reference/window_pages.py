# SPDX-License-Identifier: Apache-2.0
"""What one request sees in full precision, from its pages and the chunk."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from polykv_vllm.reference.windows import Windows


@dataclass(frozen=True, eq=False)
class RequestWindow:
    """One request of a `WindowBatch` with one layer's `RawRows`; names as there.

    Attributes:
        windows: Sinks that have copies, and recent tokens.
        recent_begin: From this token on there are copies.
        sink_pages: Pages of the granules from the sequence's start on.
        recent_pages: Pages of the granules from that of `recent_begin` on.
        key: `[num_queries, num_kv_heads, head_dim]`: the chunk's own.
        value: Like `key`.
        window_cache: `[num_pages, 2, num_kv_heads, page_tokens, head_dim]`.
        centers: `[num_kv_heads, head_dim]` fp32: what cached keys are stored without,
            so raw ones go without it too; None for nothing.

    """

    windows: Windows
    recent_begin: int
    sink_pages: Sequence[int]
    recent_pages: Sequence[int]
    key: torch.Tensor
    value: torch.Tensor
    window_cache: torch.Tensor
    centers: torch.Tensor | None = None

    def rows(
        self, seq_len: int, sliding_window: int = -1
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Gather what the chunk's queries see raw.

        Args:
            seq_len: Tokens of the request, the chunk's included.
            sliding_window: Keys that a query sees, itself included; -1 for all.

        Returns:
            Keys and values `[seq_len, num_kv_heads, head_dim]`, NaN where no query sees
            them raw, and `[num_queries, seq_len]` bool: which pairs are raw.

        Raises:
            ValueError: A page that is needed does not exist.

        """
        context = seq_len - self.key.shape[0]
        if not 0 <= self.recent_begin <= context:
            raise ValueError(
                f"recent_begin {self.recent_begin} is not within the {context} tokens "
                "before the chunk"
            )
        positions, tokens = torch.arange(context, seq_len), torch.arange(seq_len)
        sinks = tokens < self.windows.sink_tokens
        seen = self.windows.is_full(positions, tokens)
        seen &= sinks | (tokens >= self.recent_begin)
        seen &= tokens <= positions.unsqueeze(-1)
        if sliding_window > 0:
            seen &= tokens > positions.unsqueeze(-1) - sliding_window
        key, value = (
            torch.full((context, *rows.shape[1:]), torch.nan, dtype=rows.dtype)
            for rows in (self.key, self.value)
        )
        for token in seen[:, :context].any(0).nonzero()[:, 0].tolist():
            page = self._page(token, bool(sinks[token]))
            offset = token % self.window_cache.shape[3]
            key[token], value[token] = self.window_cache[page, :, :, offset]
        key = torch.cat((key, self.key))
        if self.centers is not None:
            key = key.float() - self.centers
        return key, torch.cat((value, self.value)), seen

    def _page(self, token: int, is_sink: bool) -> int:
        size = self.window_cache.shape[3]
        pages = self.sink_pages if is_sink else self.recent_pages
        entry = token // size - (0 if is_sink else self.recent_begin // size)
        page = pages[entry] if entry < len(pages) else -1
        if not 0 <= page < self.window_cache.shape[0]:
            raise ValueError(
                f"page {page} of token {token} is none of the window cache's "
                f"{self.window_cache.shape[0]}"
            )
        return page

# SPDX-License-Identifier: Apache-2.0
"""Full-precision windows: what attention reads beside the compressed cache.

A query at position p sees the first tokens and the newest ones up to itself as the
model made them, every other token as the cache holds it, in one softmax:

    raw         [0, sink_tokens) and [max(p - recent_tokens + 1, recent_begin), p]
    compressed  the others up to p

Raw copies of tokens before the chunk are in pages, those of the chunk are its keys and
values themselves. A token whose copy is gone is attended to as compressed.
"""

from dataclasses import dataclass

import torch

from polykv_vllm.formats import WINDOW_PAGE_TOKENS
from polykv_vllm.ops._checks import check_index
from polykv_vllm.ops._structs import RawRowStruct, Windows


@dataclass(frozen=True, eq=False)
class WindowBatch:
    """Which raw copies the requests of one step have, for all layers of a KV group.

    Attributes:
        recent_tokens: Newest tokens that a query sees raw, itself included; 0 for none.
        sink_tokens: `[num_reqs]` int32 on the CPU: first tokens that are seen raw,
            copies of all of them being there. May exceed the sequence.
        recent_begin: `[num_reqs]` int32: from this token on there are copies; at most
            the tokens before the chunk.
        sink_pages: `[num_reqs, n]` int32: entry i is the page of tokens 32 i to
            32 i + 31, for those before the chunk.
        recent_pages: `[num_reqs, m]` int32: entry j is the page with token
            32 * (recent_begin // 32 + j), up to the chunk; read are the entries whose
            tokens a query sees. Others may be anything, like -1.

    Raises:
        ValueError: Shapes, dtypes or strides do not fit.

    """

    recent_tokens: int
    sink_tokens: torch.Tensor
    recent_begin: torch.Tensor
    sink_pages: torch.Tensor
    recent_pages: torch.Tensor

    def __post_init__(self) -> None:
        """Check what the values do not say; those are the implementation's task."""
        if self.recent_tokens < 0:
            raise ValueError(
                f"recent_tokens must be at least 0, not {self.recent_tokens}"
            )
        check_index("sink_tokens", self.sink_tokens, torch.int32, 1)
        check_index("recent_begin", self.recent_begin, torch.int32, 1)
        check_index("sink_pages", self.sink_pages, torch.int32, 2)
        check_index("recent_pages", self.recent_pages, torch.int32, 2)

    def check_requests(self, num_reqs: int) -> None:
        """Raise ValueError unless every tensor has so many requests."""
        for name in ("sink_tokens", "recent_begin", "sink_pages", "recent_pages"):
            found = getattr(self, name).shape[0]
            if found < num_reqs:
                raise ValueError(f"{name} has {found} of {num_reqs} requests")

    def struct(self) -> Windows:
        """Return the kernels' view of the tensors, which have to stay."""
        sinks, recent = self.sink_pages, self.recent_pages
        return Windows(
            self.sink_tokens.data_ptr(),
            self.recent_begin.data_ptr(),
            sinks.data_ptr(),
            recent.data_ptr(),
            sinks.stride(0),
            recent.stride(0),
            sinks.shape[1],
            recent.shape[1],
            self.recent_tokens,
        )


@dataclass(frozen=True, eq=False)
class RawRows:
    """One layer's keys and values as the model made them: after RoPE, no transform.

    Attributes:
        key: `[num_tokens, num_kv_heads, head_dim]` in the dtype of the queries, whose
            rows it has: the chunk's own tokens.
        value: Like `key`, before any rotation of values.
        window_cache: `[num_pages, 2, num_kv_heads, 32, head_dim]` in the same dtype,
            the last two dimensions contiguous: keys, values of the tokens before.

    """

    key: torch.Tensor
    value: torch.Tensor
    window_cache: torch.Tensor

    def check(self, query: torch.Tensor, num_kv_heads: int) -> None:
        """Raise ValueError unless the rows are those of the queries' layer."""
        head_dim = query.shape[-1]
        for name in ("key", "value"):
            rows = getattr(self, name)
            if (
                rows.dim() != 3
                or rows.shape[0] < query.shape[0]
                or tuple(rows.shape[1:]) != (num_kv_heads, head_dim)
                or rows.stride(2) != 1
            ):
                raise ValueError(
                    f"raw {name} must be [{query.shape[0]} tokens, {num_kv_heads}, "
                    f"{head_dim}] with a contiguous last dimension, not "
                    f"{list(rows.shape)} with strides {rows.stride()}"
                )
        pages = self.window_cache
        page = (2, num_kv_heads, WINDOW_PAGE_TOKENS, head_dim)
        if (
            pages.dim() != 5
            or tuple(pages.shape[1:]) != page
            or (pages.numel() and pages.stride()[3:] != (head_dim, 1))
        ):
            raise ValueError(
                f"window_cache must be [num_pages, {', '.join(map(str, page))}] with "
                "the last two dimensions contiguous, not "
                f"{list(pages.shape)} with strides {pages.stride()}"
            )
        for name in ("key", "value", "window_cache"):
            rows = getattr(self, name)
            if rows.dtype != query.dtype or rows.device != query.device:
                raise ValueError(
                    f"raw {name} is {rows.dtype} on {rows.device}, the query "
                    f"{query.dtype} on {query.device}"
                )

    def struct(self) -> RawRowStruct:
        """Return the kernels' view of the tensors, which have to stay for the call."""
        pages = self.window_cache
        return RawRowStruct(
            self.key.data_ptr(),
            self.value.data_ptr(),
            pages.data_ptr(),
            *self.key.stride()[:2],
            *self.value.stride()[:2],
            pages.shape[0],
            *pages.stride()[:3],
        )


def check_windows(windows: WindowBatch | None, raw: RawRows | None) -> None:
    """Raise ValueError where there are windows without rows, or rows without."""
    if (windows is None) != (raw is None):
        found = "raw rows but no windows" if windows is None else "windows but no rows"
        raise ValueError(
            f"the batch has {found}: AttentionBatch.windows and raw go together"
        )

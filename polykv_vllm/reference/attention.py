# SPDX-License-Identifier: Apache-2.0
"""Paged attention over the dequantized cache, fp32, one request at a time."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from polykv_vllm.formats import FormatSpec
from polykv_vllm.reference.cache import gather
from polykv_vllm.reference.window_pages import RequestWindow


class Exact(NamedTuple):
    """Tokens that queries see as the model made them, instead of as cached.

    Attributes:
        query: `[num_queries, num_heads, head_dim]` before any key transform.
        key: `[seq_len, num_kv_heads, head_dim]`; rows that no query sees raw may hold
            anything.
        value: Like `key`.
        seen: `[num_queries, seq_len]` bool: which pairs are raw.

    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    seen: torch.Tensor


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    sliding_window: int = -1,
    soft_cap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    exact: Exact | None = None,
) -> torch.Tensor:
    """Causal attention of the last tokens of a sequence.

    Args:
        query: `[num_queries, num_heads, head_dim]`: the last `num_queries` tokens.
        key: `[seq_len, num_kv_heads, head_dim]` fp32 or fp64.
        value: Like `key`.
        scale: Softmax scale.
        sliding_window: Keys that a query sees, itself included; -1 for all.
        soft_cap: A logit s becomes `cap * tanh(s / cap)`; 0 for none.
        alibi_slopes: `[num_heads]`, times key minus query position is then added to
            the logits; None for none (arXiv 2108.12409).
        sinks: `[num_heads]` logits that count in the denominator only; None for none.
        exact: What is seen in full precision; None for nothing.

    Returns:
        `[num_queries, num_heads, head_dim]` in the dtype of `key`.

    """
    num_queries, num_heads, _ = query.shape
    seq_len, num_kv_heads, _ = key.shape
    group = num_heads // num_kv_heads
    position = torch.arange(seq_len - num_queries, seq_len).unsqueeze(1)
    token = torch.arange(seq_len).unsqueeze(0)
    visible = token <= position
    if sliding_window > 0:
        visible &= token > position - sliding_window
    output = torch.empty(query.shape, dtype=key.dtype)
    for head in range(num_heads):
        k, v = key[:, head // group], value[:, head // group]
        scores = query[:, head].to(key.dtype) @ k.T * scale
        if exact is not None:
            raw_k = exact.key[:, head // group].to(key.dtype)
            raw = exact.query[:, head].to(key.dtype) @ raw_k.T * scale
            scores = torch.where(exact.seen, raw, scores)
        if soft_cap > 0:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        if alibi_slopes is not None:
            scores = scores + alibi_slopes[head].to(key.dtype) * (token - position)
        scores = scores.masked_fill(~visible, -torch.inf)
        if sinks is not None:
            sink = sinks[head].to(key.dtype).expand(num_queries, 1)
            scores = torch.cat((scores, sink), 1)
        weights = scores.softmax(-1)[:, :seq_len]
        if exact is None:
            output[:, head] = _weighted(weights, v, visible)
            continue
        raw_v = exact.value[:, head // group].to(key.dtype)
        output[:, head] = _weighted(weights, v, visible & ~exact.seen)
        output[:, head] += _weighted(weights, raw_v, visible & exact.seen)
    return output


def _weighted(
    weights: torch.Tensor, value: torch.Tensor, seen: torch.Tensor
) -> torch.Tensor:
    # Rows that no query sees may hold NaN: select them out, 0 * NaN is NaN.
    clean = torch.where(seen.any(0).unsqueeze(1), value, torch.zeros_like(value))
    return torch.where(seen, weights, 0) @ clean


def paged_attention(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    output: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    fmt: FormatSpec,
    scale: float,
    sliding_window: int = -1,
    soft_cap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    windows: Sequence[RequestWindow | None] | None = None,
    plain_query: torch.Tensor | None = None,
) -> None:
    """Attention over the cache; arguments as `ops.paged_attention`, but these.

    Args:
        query: Through the key transform.
        windows: Of each request what it sees raw; None for nothing.
        plain_query: With `windows`: the query before the key transform.

    """
    starts = query_start_loc.tolist()
    for request, seq_len in enumerate(seq_lens.tolist()):
        first, last = starts[request], starts[request + 1]
        if first == last:
            continue
        key, value = gather(
            kv_cache, block_table[request], seq_len, query.shape[-1], fmt
        )
        exact = None
        window = None if windows is None else windows[request]
        if window is not None:
            assert plain_query is not None
            raw = window.rows(seq_len, sliding_window)
            exact = Exact(plain_query[first:last], *raw)
        output[first:last] = attention(
            query[first:last],
            key,
            value,
            scale,
            sliding_window,
            soft_cap,
            alibi_slopes,
            sinks,
            exact,
        ).to(output.dtype)

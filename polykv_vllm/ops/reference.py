# SPDX-License-Identifier: Apache-2.0
"""The torch oracle behind the ops' signatures (isa "reference"); slow."""

from itertools import pairwise

import torch

from polykv_vllm.formats import FormatSpec
from polykv_vllm.keys import KeyTransform
from polykv_vllm.ops.batch import AttentionBatch
from polykv_vllm.ops.logits import LogitTerms
from polykv_vllm.ops.table import validate_cache
from polykv_vllm.ops.windows import RawRows, WindowBatch, check_windows
from polykv_vllm.reference import attention, cache
from polykv_vllm.reference.window_pages import RequestWindow
from polykv_vllm.reference.windows import Windows


def _check(
    kv_cache: torch.Tensor, fmt: FormatSpec, head_dim: int, transform: KeyTransform
) -> None:
    slot_bytes = fmt.slot_bytes(head_dim)
    validate_cache(kv_cache.shape, kv_cache.stride(), kv_cache.dtype, slot_bytes)
    transform.check_shape(kv_cache.shape[1], head_dim)


class LayerStore:
    """See `ops.layer_store`."""

    def __init__(
        self, fmt: FormatSpec, num_threads: int, key_transform: KeyTransform | None
    ) -> None:
        del num_threads
        self._fmt, self._transform = fmt, key_transform or KeyTransform()

    def __call__(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Quantize and scatter."""
        _check(kv_cache, self._fmt, key.shape[-1], self._transform)
        key = self._transform.keys(key)
        cache.reshape_and_cache(key, value, kv_cache, slot_mapping, self._fmt)


class LayerAttention:
    """See `ops.layer_attention`. Shared blocks are read for every request anew."""

    def __init__(
        self,
        fmt: FormatSpec,
        scale: float,
        sliding_window: int,
        fast: bool,
        num_threads: int,
        key_transform: KeyTransform | None,
        logits: LogitTerms | None,
    ) -> None:
        del fast, num_threads
        self._logits = logits or LogitTerms()
        self._transform = key_transform or KeyTransform()
        self._logits.check_transform(self._transform)
        self._fmt, self._scale, self._window = fmt, scale, sliding_window

    def __call__(
        self,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        output: torch.Tensor,
        batch: AttentionBatch,
        raw: RawRows | None = None,
    ) -> None:
        """Attend."""
        check_windows(batch.windows, raw)
        _check(kv_cache, self._fmt, query.shape[-1], self._transform)
        self._logits.check_heads(query.shape[1])
        windows = None
        if batch.windows is not None and raw is not None:
            raw.check(query, kv_cache.shape[1])
            windows = request_windows(
                batch.query_start_loc, batch.windows, raw, self._transform.centers
            )
        attention.paged_attention(
            self._transform.queries(query),
            kv_cache,
            output,
            batch.block_table,
            batch.seq_lens,
            batch.query_start_loc,
            self._fmt,
            self._scale,
            self._window,
            self._logits.soft_cap,
            self._logits.alibi_slopes,
            self._logits.sinks,
            windows,
            query,
        )


def request_windows(
    query_start_loc: torch.Tensor,
    windows: WindowBatch,
    raw: RawRows,
    centers: torch.Tensor | None,
) -> list[RequestWindow]:
    """Return what each request of a batch sees raw."""
    starts = query_start_loc.tolist()
    return [
        RequestWindow(
            Windows(int(windows.sink_tokens[r]), windows.recent_tokens),
            int(windows.recent_begin[r]),
            windows.sink_pages[r].tolist(),
            windows.recent_pages[r].tolist(),
            raw.key[first:last],
            raw.value[first:last],
            raw.window_cache,
            centers,
        )
        for r, (first, last) in enumerate(pairwise(starts))
    ]

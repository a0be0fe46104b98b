# SPDX-License-Identifier: Apache-2.0
"""What the requests of a batch share, found once per step and told to the metrics."""

import time
from typing import Any

import torch
from vllm.v1.kv_cache_interface import SlidingWindowSpec

from polykv_vllm import ops
from polykv_vllm.metrics import BatchSharing, get_recorder

_UNCOMPRESSED_BITS = 16


def group_window(spec: Any) -> int:
    """Return the sliding window of a KV cache group's layers; -1 for none.

    A FullAttentionSpec may name a window, too: that of some of its layers, where vLLM
    put all layers into one group. What is made without windows suits them all.
    """
    return spec.sliding_window if isinstance(spec, SlidingWindowSpec) else -1


class SharingPlanner:
    """Builds the prefix forests of one KV cache group.

    Args:
        kv_cache_spec: The group's, as vLLM hands it to a metadata builder.
        num_layers: Attention layers of the group.
        num_heads: Query heads of this worker.
        enabled: The option `prefix_sharing`. Without it the batch is counted alone.

    """

    def __init__(
        self, kv_cache_spec: Any, num_layers: int, num_heads: int, enabled: bool
    ) -> None:
        spec = kv_cache_spec
        self._block_size = spec.block_size
        self._group = max(1, num_heads // spec.num_kv_heads)
        self._window = group_window(spec)
        self._enabled = enabled
        self._token_bytes = num_layers * spec.page_size_bytes / spec.block_size
        elements = 2 * spec.num_kv_heads * spec.head_size * num_layers
        self._uncompressed_token_bytes = elements * _UNCOMPRESSED_BITS // 8
        self._recorder = get_recorder()
        self._recorder_group = self._recorder.add_group()

    def plan(
        self,
        block_table: torch.Tensor,
        seq_lens: torch.Tensor,
        query_start_loc: torch.Tensor,
    ) -> ops.PrefixForest | None:
        """Return what attention is to read once; None where sharing is off.

        Args:
            block_table: `[num_reqs, max_num_blocks]` int32.
            seq_lens: `[num_reqs]` int32, the query tokens included.
            query_start_loc: `[num_reqs + 1]` int32.

        """
        start = time.perf_counter()
        forest = ops.build_prefix_forest(
            block_table,
            seq_lens,
            query_start_loc,
            self._block_size,
            self._group,
            self._window,
        )
        self._record(forest.counts, time.perf_counter() - start)
        return forest if self._enabled else None

    def _record(self, counts: ops.SharingCounts, seconds: float) -> None:
        unshared = {
            "no_other_reader": counts.no_other_reader_pairs,
            "own_chunk": counts.own_token_pairs,
            "cost_rule": counts.no_gain_pairs,
        }
        if not self._enabled:
            unshared["switched_off"] = counts.shared_pairs
            batch = BatchSharing(unshared_tokens=unshared, build_seconds=seconds)
            self._recorder.record_batch(batch, self._recorder_group)
            return
        physical = counts.physical_tokens
        batch = BatchSharing(
            shared_tokens=counts.shared_pairs,
            unshared_tokens=unshared,
            prefixes=counts.distinct_prefixes,
            readers_max=counts.max_readers,
            readers_mean=counts.logical_tokens / physical if physical else 0.0,
            physical_bytes=int(physical * self._token_bytes),
            logical_bytes=counts.logical_tokens * self._uncompressed_token_bytes,
            build_seconds=seconds,
        )
        self._recorder.record_batch(batch, self._recorder_group)

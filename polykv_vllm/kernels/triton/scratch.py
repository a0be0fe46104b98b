# SPDX-License-Identifier: Apache-2.0
"""Scratch memory of attention, shared by all layers.

None of it grows with the context beyond a fixed limit: int8 queries and the states of
prefill rows are bounded by the batch's tokens, the states of split rows by
`SCRATCH_BYTES`, beyond which the KV heads go through in several turns.
"""

from typing import Any

import torch

SCRATCH_BYTES = 256 << 20


class Scratch:
    """Memory that all layers use in turn; it grows to what was needed once."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[Any, ...], torch.Tensor] = {}

    def get(
        self, name: str, count: int, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Return at least `count` elements, contents undefined."""
        key = (name, dtype, device)
        buffer = self._buffers.get(key)
        if buffer is None or buffer.numel() < count:
            buffer = torch.empty(count, dtype=dtype, device=device)
            self._buffers[key] = buffer
        return buffer


SCRATCH = Scratch()


def heads_in_flight(slots: int, group: int, head_dim: int, kv_heads: int) -> int:
    """Return how many KV heads' states fit `SCRATCH_BYTES`, at least one."""
    bytes_per_head = slots * group * (head_dim + 2) * 4
    return max(1, min(kv_heads, SCRATCH_BYTES // bytes_per_head))


def query_buffers(
    rows: int, head_dim: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return memory for prepared queries: int8 terms, scales, corrections."""
    return (
        SCRATCH.get("terms", 2 * rows * head_dim, torch.int8, device),
        SCRATCH.get("scale", rows, torch.float32, device),
        SCRATCH.get("correction", rows, torch.int32, device),
    )


def state_buffers(
    rows: int, head_dim: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return memory for partial states: weighted values, maxima, sums of weights."""
    return (
        SCRATCH.get("acc", rows * head_dim, torch.float32, device),
        SCRATCH.get("peak", rows, torch.float32, device),
        SCRATCH.get("total", rows, torch.float32, device),
    )

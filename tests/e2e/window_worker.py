# SPDX-License-Identifier: Apache-2.0
"""Runs in vLLM's worker: compares each step's attention with what it should be.

It keeps the raw keys and values of every slot of the cache itself, so it needs no
pages: from them and from the compressed cache the oracle computes what queries are to
see. A slot's raw rows are those that were written last, whichever request wrote them.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from polykv_vllm.reference.attention import Exact, attention
from polykv_vllm.reference.cache import gather
from polykv_vllm.reference.windows import Windows
from tests.e2e.worker_extension import TestExtension


@dataclass
class Watched:
    """What was seen since `polykv_watch`.

    Attributes:
        rows: Query rows, summed over layers.
        incomplete_rows: Of these, the rows that saw less raw than they should.
        error: Largest error of an output, relative to the largest output.
        compressed_error: The same, had all been attended as compressed.

    """

    rows: int = 0
    incomplete_rows: int = 0
    error: float = 0.0
    compressed_error: float = 0.0


class WindowExtension(TestExtension):
    """Mixed into the worker class by `worker_extension_cls`."""

    def polykv_watch(self, sink_tokens: int, recent_tokens: int) -> None:
        """Compare from now on; windows are to be of these sizes."""
        self._watched = Watched()
        self._windows = Windows(sink_tokens, recent_tokens)
        if not hasattr(self, "_rows"):
            self._rows: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
            for impl in self._impls():
                impl.forward = self._watching(impl, impl.forward)

    def polykv_watched(self) -> dict[str, Any]:
        """Return what was seen."""
        return vars(self._watched)

    def _watching(self, impl: Any, forward: Any) -> Any:
        def watch(
            layer: Any,
            query: torch.Tensor,
            key: torch.Tensor,
            value: torch.Tensor,
            kv_cache: torch.Tensor,
            metadata: Any,
            output: torch.Tensor,
            **more: Any,
        ) -> Any:
            result = forward(
                layer, query, key, value, kv_cache, metadata, output, **more
            )
            if metadata is not None:
                self._remember(impl, key, value, kv_cache, metadata)
                self._compare(impl, query, kv_cache, metadata, output)
            return result

        return watch

    def _remember(
        self, impl: Any, key: Any, value: Any, kv_cache: Any, metadata: Any
    ) -> None:
        slots = metadata.slot_mapping
        num_slots = kv_cache.shape[0] * kv_cache.shape[2]
        if id(impl) not in self._rows:
            shape = (num_slots, *key.shape[1:])
            self._rows[id(impl)] = (torch.zeros(shape), torch.zeros(shape))
        written = slots >= 0
        for rows, new in zip(self._rows[id(impl)], (key, value), strict=True):
            rows[slots[written]] = new[: len(slots)][written].float()

    def _compare(
        self, impl: Any, query: Any, kv_cache: Any, metadata: Any, output: Any
    ) -> None:
        starts = metadata.query_start_loc.tolist()
        for index, (first, last) in enumerate(pairwise(starts)):
            length = int(metadata.seq_lens[index])
            blocks = metadata.block_table[index]
            rows = query[first:last]
            tokens = torch.arange(length)
            positions = tokens[length - len(rows) :]
            size = kv_cache.shape[2]
            slots = blocks[tokens // size] * size + tokens % size
            key, value = (each[slots.long()] for each in self._rows[id(impl)])
            batch, wanted = metadata.windows.batch, self._windows
            seen = tokens < batch.sink_tokens[index]
            recent = tokens > positions.unsqueeze(1) - wanted.recent_tokens
            seen = seen | (recent & (tokens >= batch.recent_begin[index]))
            cached = gather(kv_cache, blocks, length, query.shape[-1], impl.fmt)
            transformed = impl.key_transform.queries(rows)
            if impl.key_transform.centers is not None:
                key = key - impl.key_transform.centers
            window = impl.sliding_window
            expected, compressed = (
                attention(
                    transformed,
                    *cached,
                    impl.scale,
                    window,
                    exact=Exact(rows, key, value, mask),
                )
                for mask in (seen, torch.zeros_like(seen))
            )
            visible = tokens <= positions.unsqueeze(1)
            if window > 0:
                visible &= tokens > positions.unsqueeze(1) - window
            missing = (wanted.is_full(positions, tokens) & ~seen & visible).any(1)
            self._note(output[first:last], expected, compressed, missing)

    def _note(self, output: Any, expected: Any, compressed: Any, missing: Any) -> None:
        watched, largest = self._watched, expected.abs().max()
        error = (output.view(expected.shape).float() - expected).abs().max()
        difference = (compressed - expected).abs().max()
        watched.rows += len(missing)
        watched.incomplete_rows += int(missing.sum())
        watched.error = max(watched.error, float(error / largest))
        watched.compressed_error = max(
            watched.compressed_error, float(difference / largest)
        )

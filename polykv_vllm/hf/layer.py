# SPDX-License-Identifier: Apache-2.0
"""One layer of the packed cache: stores new rows, attends to what it holds."""

from typing import Any

import torch
from transformers.cache_utils import CacheLayerMixin

from polykv_vllm import ops
from polykv_vllm.hf.sequences import Sequences
from polykv_vllm.keys import KeyTransform
from polykv_vllm.reference.pack import unpack_tile
from polykv_vllm.reference.quantize import dequantize_key, dequantize_value

IMPLEMENTATION = "polykv"
"""Name of the attention implementation that reads packed blocks."""

_HANDLE = "polykv_layer"


def layer_of(key: torch.Tensor) -> "PackedLayer | None":
    """Return the layer that stored these keys, None for keys of another cache."""
    return getattr(key, _HANDLE, None)


class PackedLayer(CacheLayerMixin):
    """Packed keys and values of one attention layer.

    All tokens are kept, also where the layer has a sliding window.

    Args:
        index: Number of the layer.
        sequences: The rows of the batch, the same object for all layers.
        config: The model's config: names the attention that is to read the cache.
        transform: How keys are treated before they are quantized; None for not at all.
        length: Tokens per row that the blocks of `sequences` hold already.

    """

    is_sliding = False

    def __init__(
        self,
        index: int,
        sequences: Sequences,
        config: Any,
        transform: KeyTransform | None,
        length: int = 0,
    ) -> None:
        super().__init__()
        self.is_initialized = True
        self.length = length
        self._index, self._sequences, self._config = index, sequences, config
        self._transform = transform
        self._store = ops.layer_store(sequences.store.fmt, key_transform=transform)
        self._attend: dict[tuple[float, int], ops.dispatch.LayerAttention] = {}

    def lazy_initialization(
        self, key_states: torch.Tensor, value_states: torch.Tensor
    ) -> None:
        """Do nothing: blocks are allocated as tokens come."""

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store new keys and values.

        Args:
            key_states: `[rows, num_kv_heads, new tokens, head_dim]` after RoPE.
            value_states: Like `key_states`.
            args: Of no use here.
            kwargs: Of no use here.

        Returns:
            For the polykv attention: the new keys, by which it finds this layer, and
            values. For any other: all keys and values, dequantized,
            `[rows, num_kv_heads, tokens, head_dim]`, zeros for padding.

        """
        rows, _, num_tokens, _ = key_states.shape
        sequences, store = self._sequences, self._sequences.store
        with store.lock:
            step = sequences.begin(self.length, num_tokens, rows)
            key, value = _token_rows(key_states), _token_rows(value_states)
            self._store(key, value, store.layers[self._index], step.slot_mapping)
        self.length += num_tokens
        if self._config._attn_implementation == IMPLEMENTATION:
            handle = key_states.view_as(key_states)
            setattr(handle, _HANDLE, self)
            return handle, value_states
        return self.dequantized(key_states.dtype)

    def attend(
        self,
        query: torch.Tensor,
        attention_mask: torch.Tensor | None,
        scale: float,
        sliding_window: int,
    ) -> torch.Tensor:
        """Attend causally to the packed tokens, those of the last `update` included.

        Args:
            query: `[rows, num_heads, new tokens, head_dim]`.
            attention_mask: `[rows, tokens]` bool, zeros for padding; None without.
            scale: Softmax scale.
            sliding_window: Keys that a query sees, itself included; -1 for all.

        Returns:
            `[rows, new tokens, num_heads, head_dim]`; zeros for padding.

        """
        sequences = self._sequences
        sequences.check_mask(attention_mask)
        step, all_rows = sequences.step, _token_rows(query)
        rows = all_rows if step.real is None else all_rows[step.real]
        if (scale, sliding_window) not in self._attend:
            self._attend[scale, sliding_window] = ops.layer_attention(
                sequences.store.fmt,
                scale,
                sliding_window,
                key_transform=self._transform,
            )
        output = torch.empty(rows.shape, dtype=rows.dtype)  # contiguous, unlike rows
        kv_cache = sequences.store.layers[self._index]
        self._attend[scale, sliding_window](rows, kv_cache, output, step.batch)
        if step.real is not None:
            padded = torch.zeros(all_rows.shape, dtype=query.dtype)
            padded[step.real] = output
            output = padded
        return output.view(query.shape[0], -1, *output.shape[1:])

    def dequantized(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Return all keys and values `[rows, num_kv_heads, tokens, head_dim]`."""
        sequences, store = self._sequences, self._sequences.store
        shape = (store.num_kv_heads, self.length, store.head_dim)
        keys = torch.zeros(len(sequences.tables), *shape, dtype=dtype)
        values = torch.zeros_like(keys)
        for row, table in enumerate(sequences.tables):
            real = sequences.real_tokens(row, self.length)
            tiles = store.layers[self._index][table].flatten(2)
            packed = unpack_tile(tiles, store.head_dim, store.fmt)
            key, value = (
                dequantize_key(packed[0]),
                dequantize_value(packed[1], store.fmt),
            )
            # [blocks, heads, block_size, head_dim] -> [tokens, heads, head_dim]
            key, value = (
                x.transpose(1, 2).flatten(0, 1)[: len(real)] for x in (key, value)
            )
            if self._transform is not None:
                key = self._transform.restore_keys(key)
            keys[row, :, real] = key.transpose(0, 1).to(dtype)
            values[row, :, real] = value.transpose(0, 1).to(dtype)
        return keys, values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return length and offset of the keys for a mask of `query_length` queries."""
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        """Return the tokens per row, padding included."""
        return self.length

    def get_max_length(self) -> int:
        """Return -1: the cache grows."""
        return -1


def _token_rows(states: torch.Tensor) -> torch.Tensor:
    """`[rows, heads, tokens, head_dim]` -> `[rows * tokens, heads, head_dim]`."""
    return states.transpose(1, 2).flatten(0, 1)

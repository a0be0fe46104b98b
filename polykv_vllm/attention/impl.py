# SPDX-License-Identifier: Apache-2.0
"""One attention layer: hands vLLM's tensors to the ops."""

from collections.abc import Mapping
from time import perf_counter
from typing import Any, cast

import torch
from vllm.config import get_current_vllm_config
from vllm.logger import init_logger
from vllm.v1.attention.backend import AttentionImpl, AttentionType

from polykv_vllm import ops
from polykv_vllm.attention.device import kernel_device
from polykv_vllm.attention.metadata import PolyKVMetadata
from polykv_vllm.config import parse_options
from polykv_vllm.errors import UnsupportedError
from polykv_vllm.formats import get_format
from polykv_vllm.keys import SCALING, KeyTransform, key_transform
from polykv_vllm.metrics import open_recorder

logger = init_logger("vllm.polykv")


class PolyKVImpl(AttentionImpl[PolyKVMetadata]):
    """Attention over a compressed cache; the format may differ between layers."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
        **extra_impl_args: Any,
    ) -> None:
        """Keep what the kernels need and refuse what they do not have.

        Raises:
            UnsupportedError: The layer is not plain causal decoder attention.

        """
        unsupported = {
            f"{attn_type} attention": attn_type != AttentionType.DECODER,
            "KV sharing between layers": kv_sharing_target_layer_name is not None,
        }
        unsupported |= {
            f"the argument {name}": value is not None
            for name, value in extra_impl_args.items()
        }
        if found := [name for name, is_used in unsupported.items() if is_used]:
            raise UnsupportedError(
                f"{kv_cache_dtype} does not support {', '.join(found)}; it serves "
                "causal decoder attention, with or without a sliding window, a logits "
                "soft cap, ALiBi slopes and attention sinks"
            )
        self.fmt = get_format(kv_cache_dtype)
        self.fmt.check_head_dim(head_size)
        self.kv_cache_dtype = kv_cache_dtype
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads or num_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.sliding_window = -1 if sliding_window is None else sliding_window
        # A parameter whose values come with the weights; the kernels read a copy.
        self.sinks = sinks
        self._has_final_sinks = sinks is None
        self._logits = ops.LogitTerms(
            float(logits_soft_cap or 0.0),
            None if alibi_slopes is None else torch.tensor(alibi_slopes).float(),
            None if sinks is None else torch.zeros(sinks.shape, dtype=torch.float32),
        )
        self._logits.check_heads(num_heads)
        vllm_config = get_current_vllm_config()
        parallel = vllm_config.parallel_config
        self.recorder = open_recorder(parallel.data_parallel_index, parallel.rank)
        self.recorder_layer = self.recorder.add_layer()
        # Raw pages, made with the cache (attention/window_memory.py).
        self.window_cache: torch.Tensor | None = None
        options = parse_options(vllm_config.additional_config)
        self._device = kernel_device()
        default = ops.default_isa(self._device)
        self.isa = default if options.isa == "auto" else options.isa
        # On a GPU: requests, and tokens of the longest one, of a full batch.
        self._full_batch = (0, 0)
        if self._device == "cuda":
            self._full_batch = (
                vllm_config.scheduler_config.max_num_seqs,
                vllm_config.model_config.max_model_len,
            )
        self._fast = options.fast_arithmetic
        self.asked_key_treatment = options.key_treatment
        self.asked_calibration = options.calibration
        # Digest of what is folded into the weights (attention/calibration.py).
        self.calibration: str | None = None
        # What it says about the keys, for formats of few bits.
        self.calibrated_keys: KeyTransform | None = None
        self.has_seen_weights = False
        # Scales come when the weights are final (attention/key_treatment.py).
        needs_weights = options.key_treatment in SCALING
        self.set_key_transform(
            KeyTransform() if needs_weights else key_transform(options.key_treatment)
        )
        self.has_final_transform = options.key_treatment in ("none", "hadamard")
        logger.info_once(
            "KV cache format %s: %d bytes per token and KV head (in 16 bits: %d), "
            "kernels: %s",
            self.fmt.name,
            self.fmt.slot_bytes(head_size),
            4 * head_size,
            self.isa,
        )

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Take what came with the weights; called again when they are reloaded.

        Args:
            act_dtype: Of the model's activations (unused).

        """
        self._take_sinks()

    def _take_sinks(self) -> None:
        """Copy the attention sinks, if any, to where the kernels read them."""
        if self.sinks is not None and self._logits.sinks is not None:
            self._logits.sinks.copy_(self.sinks)
        self._has_final_sinks = True

    @property
    def has_alibi(self) -> bool:
        """Whether the layer adds ALiBi's bias to its scores."""
        return self._logits.alibi_slopes is not None

    def check_key_transform(self, transform: KeyTransform) -> None:
        """Raise ValueError unless keys of this layer can go through a transform."""
        transform.check_shape(self.num_kv_heads, self.head_size)
        self._logits.check_transform(transform)

    def set_key_transform(self, transform: KeyTransform) -> None:
        """Say what keys go through before they are quantized; nothing is cached yet."""
        self.check_key_transform(transform)
        self.key_transform = transform
        self.has_final_transform = True
        self._store = ops.layer_store(
            self.fmt, key_transform=transform, device=self._device, isa=self.isa
        )
        self._attend = ops.layer_attention(
            self.fmt,
            self.scale,
            self.sliding_window,
            key_transform=transform,
            logits=self._logits,
            fast=self._fast,
            device=self._device,
            isa=self.isa,
        )

    def do_kv_cache_update(
        self,
        layer: torch.nn.Module,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Quantize new keys and values into their slots.

        Args:
            layer: The attention layer; its scales are not used, ours are per row.
            key: `[num_tokens, num_kv_heads, head_size]`, maybe with padding rows.
            value: Like `key`.
            kv_cache: `[num_blocks, num_kv_heads, block_size, slot_bytes]` uint8.
            slot_mapping: `[num_tokens]` int64; -1 for padding.

        """
        start = perf_counter()
        self._store(key, value, kv_cache, slot_mapping)
        if self._device == "cpu":  # a GPU has only been told what to do
            self.recorder.add_store_seconds(perf_counter() - start)

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: PolyKVMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend to what the cache holds, new tokens included.

        Args:
            layer: The attention layer (unused).
            query: `[num_tokens, num_heads, head_size]`.
            key: `[num_tokens, num_kv_heads, head_size]`; used with windows of full
                precision only: `do_kv_cache_update` has stored it.
            value: Like `key`.
            kv_cache: `[num_blocks, num_kv_heads, block_size, slot_bytes]` uint8.
            attn_metadata: The batch; None while vLLM profiles or warms up.
            output: Like `query`; written.
            output_scale: Must be None.
            output_block_scale: Must be None.

        Raises:
            NotImplementedError: Quantized output was asked for.

        """
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError(
                f"{self.kv_cache_dtype} does not write quantized attention output"
            )
        if attn_metadata is None:
            if self._device == "cuda":
                self._reserve_scratch(query)
            return output
        start = perf_counter()
        if not self._has_final_sinks:  # by a loader that does not say so
            self._take_sinks()
        windows = attn_metadata.windows
        if windows is None:
            self._attend(query, kv_cache, output, attn_metadata.batch)
        else:
            assert self.window_cache is not None
            raw = ops.RawRows(key, value, self.window_cache)
            self._attend(query, kv_cache, output, attn_metadata.batch, raw)
            # After it: a page that this step reads may get another granule's tokens.
            windows.write(key, value, self.window_cache)
        if self._device == "cpu":
            seconds = perf_counter() - start
            self.recorder.add_attention_seconds(seconds, self.recorder_layer)
        return output

    def _reserve_scratch(self, query: torch.Tensor) -> None:
        """Take scratch memory while vLLM measures what is left for the cache.

        For decoding with as many requests as may run, each as long as may be; a batch
        of many short chunks of long prompts may need more, and takes it then.
        """
        reserve = cast(Any, self._attend).reserve
        reserve(query, self.num_kv_heads, *self._full_batch)


def own_impls(modules: Mapping[str, torch.nn.Module]) -> dict[str, PolyKVImpl]:
    """Return the implementations of the layers that have a cache of ours, by name."""
    return {
        name: impl
        for name, module in modules.items()
        if isinstance(impl := getattr(module, "impl", None), PolyKVImpl)
    }

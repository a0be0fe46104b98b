# SPDX-License-Identifier: Apache-2.0
"""What the kernels need to know about a batch."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from vllm.v1.attention.backend import (
    AttentionCGSupport,
    AttentionMetadata,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)

from polykv_vllm import ops
from polykv_vllm.attention.sharing import SharingPlanner
from polykv_vllm.attention.windows import GroupWindows, StepWindows
from polykv_vllm.config import parse_options


@dataclass(frozen=True)
class HostLengths:
    """Lengths on the CPU, from which work lists on a GPU get their capacity.

    Attributes:
        seq_lens: `[num_reqs]` int32, at least those on the device.
        query_start_loc: `[num_reqs + 1]` int32.
        share: Whether blocks that several requests have are read once.

    """

    seq_lens: torch.Tensor
    query_start_loc: torch.Tensor
    share: bool


@dataclass
class PolyKVMetadata(AttentionMetadata):
    """One batch, the same for all layers of a KV cache group.

    Attributes:
        num_actual_tokens: Rows of query that belong to requests or to padding.
        query_start_loc: `[num_reqs + 1]` int32, offsets into the query rows.
        seq_lens: `[num_reqs]` int32, tokens in the cache, the query's included.
        block_table: `[num_reqs, max_num_blocks]` int32.
        slot_mapping: `[num_actual_tokens]` int64; -1 for padding.
        forest: Blocks that several requests read; None where sharing is off, and on
            GPUs, which find them themselves.
        host: What the host knows of a batch on a GPU; None on CPUs.
        windows: Tokens that are seen in full precision; None without windows.

    """

    num_actual_tokens: int
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    forest: ops.PrefixForest | None = None
    host: HostLengths | None = None
    windows: StepWindows | None = None

    @cached_property
    def batch(self) -> ops.AttentionBatch | ops.DeviceBatch:
        """What the kernels of all layers are told, checked once."""
        if self.host is not None:
            return ops.DeviceBatch(
                self.block_table,
                self.seq_lens,
                self.query_start_loc,
                self.host.seq_lens,
                self.host.query_start_loc,
                self.host.share,
            )
        return ops.AttentionBatch(
            self.block_table,
            self.seq_lens,
            self.query_start_loc,
            self.forest,
            None if self.windows is None else self.windows.batch,
        )


class PolyKVMetadataBuilder(AttentionMetadataBuilder[PolyKVMetadata]):
    """Takes the metadata over from vLLM and finds what the requests share."""

    supports_update_block_table = True
    # Capture was never tried: no GPU has run this yet (docs/gpu.md). vLLM then captures
    # what lies between the attention layers.
    _cudagraph_support = AttentionCGSupport.NEVER

    def __init__(
        self,
        kv_cache_spec: Any,
        layer_names: list[str],
        vllm_config: Any,
        device: torch.device,
    ) -> None:
        """Prepare for the batches of one KV cache group.

        Raises:
            UnsupportedError: A key treatment was asked for and the weights were loaded
                in a way that does not let it be found.

        """
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        # It knows the implementation, which knows this module.
        from polykv_vllm.attention.calibration import require_calibration
        from polykv_vllm.attention.key_treatment import require_key_transforms

        layers = vllm_config.compilation_config.static_forward_context
        own = {name: layers[name] for name in layer_names}
        require_key_transforms(own)
        require_calibration(own, vllm_config.model_config)
        options = parse_options(vllm_config.additional_config)
        self._share = options.prefix_sharing
        self._planner = SharingPlanner(
            kv_cache_spec,
            len(layer_names),
            vllm_config.model_config.get_num_attention_heads(
                vllm_config.parallel_config
            ),
            self._share,
        )
        # Set when the cache is there (attention/window_memory.py).
        self.windows: GroupWindows | None = None
        self._needs_windows = options.windows is not None and options.windows.is_used

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> PolyKVMetadata:
        """Build the metadata of a batch.

        Raises:
            NotImplementedError: The batch attends to later tokens too.

        """
        common = common_attn_metadata
        if isinstance(common.causal, torch.Tensor) or not common.causal:
            raise NotImplementedError(
                "a polykv cache serves causal attention only; this batch is not causal"
            )
        num_reqs = common.num_reqs
        metadata = PolyKVMetadata(
            num_actual_tokens=common.num_actual_tokens,
            query_start_loc=common.query_start_loc[: num_reqs + 1],
            seq_lens=common.seq_lens[:num_reqs],
            block_table=common.block_table_tensor[:num_reqs],
            slot_mapping=common.slot_mapping,
            host=self._host_lengths(common),
        )
        return self._completed(metadata)

    def update_block_table(
        self,
        metadata: PolyKVMetadata,
        blk_table: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> PolyKVMetadata:
        """Return the metadata of another KV cache group for the same batch."""
        num_reqs = metadata.seq_lens.shape[0]
        other = replace(
            metadata, block_table=blk_table[:num_reqs], slot_mapping=slot_mapping
        )
        return self._completed(other)

    def _host_lengths(self, common: CommonAttentionMetadata) -> HostLengths | None:
        """Return what is known without waiting for the device; None on CPUs."""
        num_reqs = common.num_reqs
        if common.block_table_tensor.device.type == "cpu":
            return None
        longest = common.seq_lens_cpu_upper_bound
        if longest is None:
            longest = torch.full((num_reqs,), common.max_seq_len, dtype=torch.int32)
        # vLLM writes the next batch into the same memory.
        starts = common.query_start_loc_cpu[: num_reqs + 1].clone()
        return HostLengths(longest[:num_reqs].int().clone(), starts, self._share)

    def _completed(self, metadata: PolyKVMetadata) -> PolyKVMetadata:
        """Find what the requests share, and which tokens they see raw."""
        if metadata.host is not None:
            return metadata
        batch = metadata.block_table, metadata.seq_lens, metadata.query_start_loc
        windows = None
        if self._needs_windows:
            if self.windows is None:
                raise RuntimeError("the cache was made without pages for windows")
            windows = self.windows.plan_step(*batch)
        return replace(metadata, forest=self._planner.plan(*batch), windows=windows)

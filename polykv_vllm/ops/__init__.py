# SPDX-License-Identifier: Apache-2.0
"""The operations on the compressed cache, whatever carries them out.

    reshape_and_cache  quantize, pack and scatter new keys and values
    paged_attention    causal attention straight from the packed blocks

A layer that runs step by step keeps one of `layer_store` and `layer_attention`.
`build_prefix_forest` finds the blocks that attention reads once for several requests.
The operations look up (op, device, isa) in one table; a missing entry raises and names
what exists. Nothing here imports vllm.
"""

from polykv_vllm.ops.batch import AttentionBatch, DeviceBatch
from polykv_vllm.ops.dispatch import (
    available_isas,
    compiled_isas,
    current_isa,
    default_isa,
    layer_attention,
    layer_store,
    layout_id,
    paged_attention,
    reshape_and_cache,
)
from polykv_vllm.ops.forest import TILE_TOKENS, build_prefix_forest
from polykv_vllm.ops.gpu import (
    cuda_capability_reasons,
    gpu_shape_reasons,
    require_triton,
)
from polykv_vllm.ops.logits import LogitTerms
from polykv_vllm.ops.segments import PrefixForest, SharingCounts
from polykv_vllm.ops.windows import WINDOW_PAGE_TOKENS, RawRows, WindowBatch

__all__ = [
    "TILE_TOKENS",
    "WINDOW_PAGE_TOKENS",
    "AttentionBatch",
    "DeviceBatch",
    "LogitTerms",
    "PrefixForest",
    "RawRows",
    "SharingCounts",
    "WindowBatch",
    "available_isas",
    "build_prefix_forest",
    "compiled_isas",
    "cuda_capability_reasons",
    "current_isa",
    "default_isa",
    "gpu_shape_reasons",
    "layer_attention",
    "layer_store",
    "layout_id",
    "paged_attention",
    "require_triton",
    "reshape_and_cache",
]

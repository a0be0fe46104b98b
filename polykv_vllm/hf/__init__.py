# SPDX-License-Identifier: Apache-2.0
"""The compressed cache in transformers, without vLLM: same formats, same kernels.

    PolyKVCache     a transformers cache whose keys and values stay packed
    SharedKVPool    a document's cache, built once and read by many

`model.set_attn_implementation("polykv")` makes a model attend to the packed bytes;
importing this package registers the name.
"""

from polykv_vllm.hf.attention import IMPLEMENTATION
from polykv_vllm.hf.cache import PolyKVCache
from polykv_vllm.hf.pool import MemorySummary, SharedKVPool
from polykv_vllm.hf.projections import read_projections

__all__ = [
    "IMPLEMENTATION",
    "MemorySummary",
    "PolyKVCache",
    "SharedKVPool",
    "read_projections",
]

# SPDX-License-Identifier: Apache-2.0
"""How one (token, KV head) becomes bytes. Pure Python: no torch, no vllm.

Everything else (store, attention, pool, disk) moves these bytes and takes the
numbers from here; C++ and Triton are compared with this package by tests.
"""

from polykv_vllm.formats.codebook import CODEBOOKS, Codebook
from polykv_vllm.formats.layout import (
    BLOCK_SIZE_MULTIPLE,
    WINDOW_PAGE_TOKENS,
    TileLayout,
)
from polykv_vllm.formats.registry import (
    ALIASES,
    CACHE_DTYPES,
    FORMATS,
    SUPPORTED_HEAD_DIMS,
    FormatSpec,
    Quantizer,
    clip_place,
    get_format,
    is_polykv_dtype,
    power_blocks,
)

__all__ = [
    "ALIASES",
    "BLOCK_SIZE_MULTIPLE",
    "CACHE_DTYPES",
    "CODEBOOKS",
    "FORMATS",
    "SUPPORTED_HEAD_DIMS",
    "WINDOW_PAGE_TOKENS",
    "Codebook",
    "FormatSpec",
    "Quantizer",
    "TileLayout",
    "clip_place",
    "get_format",
    "is_polykv_dtype",
    "power_blocks",
]

# SPDX-License-Identifier: Apache-2.0
"""Caches in the GPU's order of bytes, and the interpreter that runs the kernels."""

import os
from dataclasses import replace
from functools import cache

import pytest
import torch

from polykv_vllm.formats import FormatSpec, TileLayout
from polykv_vllm.formats.gpu_layout import GpuTileLayout, byte_permutation
from tests.kernel_cases import Batch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

only_interpreted = pytest.mark.skipif(
    not INTERPRETED, reason="runs in a process of its own: test_interpreter.py"
)


@cache
def _order(
    fmt: FormatSpec, head_dim: int, block_size: int, to_gpu: bool
) -> torch.Tensor:
    cpu = TileLayout(fmt, head_dim, block_size)
    gpu = GpuTileLayout(fmt, head_dim, block_size)
    return torch.tensor(byte_permutation(*((cpu, gpu) if to_gpu else (gpu, cpu))))


def reorder(
    kv_cache: torch.Tensor, fmt: FormatSpec, head_dim: int, *, to_gpu: bool
) -> torch.Tensor:
    """Return a cache with the bytes of each tile in the other order."""
    blocks, heads, block_size, _ = kv_cache.shape
    order = _order(fmt, head_dim, block_size, to_gpu)
    tiles = kv_cache.reshape(blocks, heads, -1)[..., order]
    return tiles.reshape(kv_cache.shape).contiguous()


def run_triton(batch: Batch, *, shared: bool = False) -> torch.Tensor:
    """Run the Triton kernels on a batch whose cache is in the CPU's order."""
    cache = reorder(batch.kv_cache, batch.fmt, batch.query.shape[-1], to_gpu=True)
    forest = batch.forest() if shared else None
    return replace(batch, kv_cache=cache).run("triton", forest=forest)

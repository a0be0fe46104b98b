# SPDX-License-Identifier: Apache-2.0
"""The store writes the bytes that the C++ kernels and the reference write."""

import pytest
import torch

from polykv_vllm import ops
from polykv_vllm.formats import FORMATS, FormatSpec
from polykv_vllm.keys import KeyTransform
from tests.gpu_cases import only_interpreted, reorder
from tests.kernel_cases import (
    BYTE_KEYS,
    DTYPES,
    FASTEST,
    make_batch,
    new_cache,
    worst_ratio,
)

pytestmark = only_interpreted

HEADS, BLOCK = 2, 32
CASES = [
    (fmt, head_dim, DTYPES[i % 3], treatment)
    for i, (fmt, head_dim, treatment) in enumerate(
        [(fmt, 64, "none") for fmt in BYTE_KEYS]
        + [(fmt, 128, "channel_scale_hadamard") for fmt in BYTE_KEYS]
        + [(FORMATS["polykv_k8v3"], 256, "hadamard")]
        + [(FORMATS["polykv_k7v4"], 64, "channel_scale")]
    )
]


def treatment_of(name: str, head_dim: int) -> KeyTransform:
    """Return a treatment with scales of its own for every channel."""
    scales = torch.rand(HEADS, head_dim) + 0.5 if "scale" in name else None
    return KeyTransform(scales, name.endswith("hadamard"))


def awkward_rows(head_dim: int, dtype: torch.dtype) -> torch.Tensor:
    """Return 20 tokens: wide norms, zeros, subnormals, an inf and a NaN."""
    rows = torch.randn(20, HEADS, head_dim)
    rows *= torch.exp(3 * torch.randn(20, HEADS, 1))
    rows[1] = 0
    rows[2] *= 1e-39
    rows[3] *= 1e30
    rows[4, 0, 5] = torch.inf
    rows[5, 1, 7] = torch.nan
    return rows.to(dtype)


@pytest.mark.parametrize(("fmt", "head_dim", "dtype", "treatment"), CASES, ids=str)
def test_same_bytes_as_the_cpu(
    fmt: FormatSpec, head_dim: int, dtype: torch.dtype, treatment: str
) -> None:
    """Whole caches are compared: what no token owns keeps its garbage."""
    transform = treatment_of(treatment, head_dim)
    key, value = awkward_rows(head_dim, dtype), awkward_rows(head_dim, dtype).flip(0)
    slots = torch.randperm(3 * BLOCK)[:20]
    slots[6] = -1
    cpu = new_cache(fmt, head_dim, BLOCK, 3, HEADS)
    gpu = reorder(cpu, fmt, head_dim, to_gpu=True)
    for isa, cache in ((FASTEST, cpu), ("triton", gpu)):
        ops.reshape_and_cache(
            key, value, cache, slots, fmt, key_transform=transform, isa=isa
        )
    assert torch.equal(gpu, reorder(cpu, fmt, head_dim, to_gpu=True))


@pytest.mark.parametrize("fmt", BYTE_KEYS, ids=lambda f: f.name)
def test_what_triton_stores_the_cpu_attends_to(fmt: FormatSpec) -> None:
    batch = make_batch(fmt, [(1, 40), (3, 21)], kv_heads=HEADS, block_size=BLOCK)
    key, value = torch.randn(2, 61, HEADS, 64)
    slots = [
        batch.block_table[r, t // BLOCK] * BLOCK + t % BLOCK
        for r, length in enumerate((40, 21))
        for t in range(length)
    ]
    gpu = torch.full_like(reorder(batch.kv_cache, fmt, 64, to_gpu=True), 0xFF)
    ops.reshape_and_cache(key, value, gpu, torch.tensor(slots), fmt, isa="triton")
    batch.kv_cache.copy_(reorder(gpu, fmt, 64, to_gpu=False))
    assert worst_ratio(batch, batch.run(FASTEST)) <= 1


def test_bad_arguments_are_named() -> None:
    fmt = FORMATS["polykv_k8v3"]
    cache = new_cache(fmt, 64, BLOCK, 2, HEADS)
    rows, slots = torch.randn(2, HEADS, 64), torch.arange(2)
    with pytest.raises(ValueError, match="bf16, fp16 or fp32"):
        ops.reshape_and_cache(rows.int(), rows.int(), cache, slots, fmt, isa="triton")
    with pytest.raises(ValueError, match="2 slots for 1 keys"):
        ops.reshape_and_cache(rows[:1], rows, cache, slots, fmt, isa="triton")
    with pytest.raises(ValueError, match="contiguous tiles"):
        ops.reshape_and_cache(rows, rows, cache[..., 1:], slots, fmt, isa="triton")

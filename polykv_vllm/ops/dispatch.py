# SPDX-License-Identifier: Apache-2.0
"""The public operations and the choice of their implementation."""

import math
import os
from functools import cache
from typing import Protocol, cast

import torch

from polykv_vllm.formats import FormatSpec
from polykv_vllm.formats.gpu_layout import GPU_LAYOUT_ID
from polykv_vllm.formats.layout import LAYOUT_ID
from polykv_vllm.keys import KeyTransform
from polykv_vllm.ops import cpu, gpu, reference
from polykv_vllm.ops.batch import AttentionBatch, DeviceBatch
from polykv_vllm.ops.logits import LogitTerms
from polykv_vllm.ops.segments import PrefixForest
from polykv_vllm.ops.table import Entry, OpTable
from polykv_vllm.ops.windows import RawRows, WindowBatch

LayerStore = cpu.LayerStore | reference.LayerStore


class LayerAttention(Protocol):
    """What `layer_attention` returns."""

    def __call__(
        self,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        output: torch.Tensor,
        batch: AttentionBatch | DeviceBatch,
        raw: RawRows | None = None,
    ) -> None:
        """Attend; the Triton kernels alone take a `DeviceBatch`."""


ISA_VARIABLE = "POLYKV_CPU_ISA"


@cache
def _table() -> OpTable:
    table = OpTable()
    for isa, (store, attend) in cpu.implementations().items():
        table.register("reshape_and_cache", "cpu", isa, store)
        table.register("paged_attention", "cpu", isa, attend)
    # The oracle, for tests and for measuring what the kernels themselves cost.
    table.register("reshape_and_cache", "cpu", "reference", reference.LayerStore)
    table.register("paged_attention", "cpu", "reference", reference.LayerAttention)
    for device in gpu.devices():
        for isa, (store, attend) in gpu.implementations().items():
            table.register("reshape_and_cache", device, isa, store)
            table.register("paged_attention", device, isa, attend)
    return table


def available_isas() -> tuple[str, ...]:
    """Instruction sets usable on this CPU, fastest first; "reference" comes last.

    Triton's interpreter is none of them; ask for it by name.
    """
    return tuple(isa for isa in _table().isas("cpu") if isa != gpu.ISA)


def compiled_isas() -> tuple[str, ...]:
    """Instruction sets in this build, whether this CPU has them or not."""
    return cpu.compiled_isas()


@cache
def current_isa() -> str:
    """The instruction set in use on CPUs: the fastest, or what POLYKV_CPU_ISA names.

    Raises:
        ValueError: POLYKV_CPU_ISA names one that this CPU or build does not have.

    """
    available = available_isas()
    forced = os.environ.get(ISA_VARIABLE)
    if not forced:
        return available[0]
    if forced not in _table().isas("cpu"):
        known = forced in compiled_isas()
        why = "this CPU does not have it" if known else "this build has no such kernels"
        raise ValueError(
            f"{ISA_VARIABLE}={forced}: {why}; available: {', '.join(available)}"
        )
    return forced


def default_isa(device: str) -> str:
    """Return what runs on a type of device where nobody asks for another."""
    return gpu.ISA if device == "cuda" else current_isa()


def layout_id(isa: str) -> str:
    """Return the order of a tile's bytes that an instruction set's kernels keep."""
    return GPU_LAYOUT_ID if isa == gpu.ISA else LAYOUT_ID


def _entry(
    op: str,
    fmt: FormatSpec,
    isa: str | None,
    device: str,
    rows: torch.Tensor | None = None,
) -> Entry:
    """Return what makes the op for one layer."""
    case = f" of {fmt.name}"
    if rows is not None:
        case = f"{case} with head size {rows.shape[-1]}"
    isa = isa or default_isa(device)
    return _table().require(op, device, isa, case)


def _check_softmax(scale: float, sliding_window: int) -> None:
    """Raise ValueError unless the scale and the window are usable numbers."""
    if not 0 < scale < math.inf:
        raise ValueError(f"the softmax scale must be positive and finite, not {scale}")
    if sliding_window < 1 and sliding_window != -1:
        raise ValueError(
            "sliding_window must be a positive number of keys, or -1 for all, not "
            f"{sliding_window}"
        )


def layer_store(
    fmt: FormatSpec,
    *,
    key_transform: KeyTransform | None = None,
    device: str = "cpu",
    isa: str | None = None,
    num_threads: int = 0,
) -> LayerStore:
    """Return `reshape_and_cache` for one layer, to be called step by step.

    It keeps its checked arguments and checks again only what is another object or has
    another form. Call it with `(key, value, kv_cache, slot_mapping)`.

    Args:
        fmt: The cache's format.
        key_transform: What keys go through before they are quantized, and queries
            before they meet them; None for nothing. The same for store and attention.
        device: Type of the device of the tensors.
        isa: Instruction set; the default is `current_isa()`, on GPUs "triton".
        num_threads: OpenMP threads; 0 is the process's default.

    Raises:
        NotImplementedError: No implementation for this device and instruction set.

    """
    make = _entry("reshape_and_cache", fmt, isa, device)
    return cast(LayerStore, make(fmt, num_threads, key_transform))


def layer_attention(
    fmt: FormatSpec,
    scale: float,
    sliding_window: int = -1,
    *,
    key_transform: KeyTransform | None = None,
    logits: LogitTerms | None = None,
    fast: bool = False,
    device: str = "cpu",
    isa: str | None = None,
    num_threads: int = 0,
) -> LayerAttention:
    """Return `paged_attention` for one layer, to be called step by step.

    It keeps its checked arguments and checks again only what is another object or has
    another form. Call it with `(query, kv_cache, output, batch)`, batch being an
    `AttentionBatch`, one for all layers, and with `raw=RawRows(...)` where the batch
    has windows. Arguments as in `paged_attention`.
    """
    _check_softmax(scale, sliding_window)
    make = _entry("paged_attention", fmt, isa, device)
    layer = make(fmt, scale, sliding_window, fast, num_threads, key_transform, logits)
    return cast(LayerAttention, layer)


def reshape_and_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    fmt: FormatSpec,
    *,
    key_transform: KeyTransform | None = None,
    isa: str | None = None,
    num_threads: int = 0,
) -> None:
    """Quantize keys and values and write them to their slots.

    Args:
        key: `[num_tokens, num_kv_heads, head_dim]` bf16, fp16 or fp32; at least as
            many tokens as `slot_mapping` has. The last dimension is contiguous.
        value: Like `key`.
        kv_cache: `[num_blocks, num_kv_heads, block_size, slot_bytes]` uint8; written.
        slot_mapping: `[num_tokens]` int64; `block * block_size + offset`, or a
            negative number for a token to skip.
        fmt: The cache's format.
        key_transform: What keys go through before they are quantized; None for
            nothing. Attention needs the same.
        isa: Instruction set; the default is `current_isa()`.
        num_threads: OpenMP threads; 0 is the process's default.

    Raises:
        ValueError: Shapes, dtypes or strides do not fit.
        NotImplementedError: No implementation for this device and instruction set.

    """
    make = _entry("reshape_and_cache", fmt, isa, key.device.type, key)
    make(fmt, num_threads, key_transform)(key, value, kv_cache, slot_mapping)


def paged_attention(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    output: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    fmt: FormatSpec,
    scale: float,
    sliding_window: int = -1,
    *,
    forest: PrefixForest | None = None,
    windows: WindowBatch | None = None,
    raw: RawRows | None = None,
    key_transform: KeyTransform | None = None,
    logits: LogitTerms | None = None,
    fast: bool = False,
    isa: str | None = None,
    num_threads: int = 0,
) -> None:
    """Causal attention of each request's last tokens over its cached tokens.

    The cache already holds the keys and values of the query tokens themselves. The
    result of a row depends on the row and on the cached bytes alone, bit for bit:
    not on the rest of the batch, the chunks of the prompt, or the threads.

    Args:
        query: `[num_tokens, num_heads, head_dim]` bf16, fp16 or fp32.
        kv_cache: `[num_blocks, num_kv_heads, block_size, slot_bytes]` uint8.
        output: Like `query`; rows of the requests are written, others untouched.
        block_table: `[num_reqs, max_num_blocks]` int32.
        seq_lens: `[num_reqs]` int32, the query tokens included.
        query_start_loc: `[num_reqs + 1]` int32, offsets into `query`.
        fmt: The cache's format.
        scale: Softmax scale.
        sliding_window: Keys that a query sees, itself included; -1 for all.
        forest: Blocks of this batch to read once for several requests
            (`build_prefix_forest`); the result is the same without.
        windows: Which tokens are seen as the model made them, not as the cache holds
            them; None for none.
        raw: Those tokens' keys and values; with `windows`.
        key_transform: What the cached keys went through; None for nothing.
        logits: Soft cap, ALiBi slopes and sinks; None for none of them.
        fast: Round probabilities to 8 bits instead of 16 before they weigh the
            values: less work, relative error up to 1e-2 instead of 3e-3. The
            reference has no such mode and computes as ever.
        isa: Instruction set; the default is `current_isa()`.
        num_threads: OpenMP threads; 0 is the process's default.

    Raises:
        ValueError: Shapes, dtypes or strides do not fit, the forest does not fit
            the block table, or pages that the windows need do not exist.
        NotImplementedError: No implementation for this device and instruction set.

    """
    _check_softmax(scale, sliding_window)
    make = _entry("paged_attention", fmt, isa, query.device.type, query)
    batch = AttentionBatch(block_table, seq_lens, query_start_loc, forest, windows)
    layer = make(fmt, scale, sliding_window, fast, num_threads, key_transform, logits)
    layer(query, kv_cache, output, batch, raw)

# SPDX-License-Identifier: Apache-2.0
"""The C++ kernels: loads the library, checks arguments, hands over pointers.

The library is plain C (ctypes), not a torch extension: it depends on no torch ABI,
so one wheel serves CPU and CUDA builds of any torch. Dtypes, shapes and strides are
checked here, the values of indices by the library (csrc/cpu/check.cpp). Both run once
per layer and step, so they are kept to a few microseconds.
"""

import ctypes as ct
import math
from collections.abc import Callable
from functools import cache, lru_cache, partial
from pathlib import Path

import torch

from polykv_vllm.formats import BLOCK_SIZE_MULTIPLE, FORMATS, FormatSpec
from polykv_vllm.ops._structs import (
    AttentionArgs,
    Cache,
    ForestArgs,
    Format,
    StoreArgs,
)
from polykv_vllm.ops.table import validate_cache

LIBRARY = Path(__file__).resolve().parent.parent / "_C.so"

_NOTHING_SHARED = torch.empty(0, dtype=torch.int32)
_DTYPES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}


@cache
def load_library() -> ct.CDLL:
    """Load the kernel library.

    Raises:
        ImportError: It is missing, or was built from other sources than these.

    """
    if not LIBRARY.exists():
        raise ImportError(
            f"{LIBRARY} is missing: polykv-vllm was not built. Install it with "
            "`pip install --no-build-isolation .` (needs a C++ compiler)."
        )
    lib = ct.CDLL(str(LIBRARY))
    lib.polykv_isa_name.restype = ct.c_char_p
    lib.polykv_reshape_and_cache.restype = ct.c_char_p
    lib.polykv_paged_attention.restype = ct.c_char_p
    lib.polykv_build_forest.restype = ct.c_int64
    structs = {"store": StoreArgs, "attention": AttentionArgs, "forest": ForestArgs}
    for name, struct in structs.items():
        sizeof = getattr(lib, f"polykv_sizeof_{name}_args")
        sizeof.restype = ct.c_int64
        if sizeof() != ct.sizeof(struct):
            raise ImportError(
                f"{LIBRARY} is stale: its {name} arguments take {sizeof()} bytes, "
                f"these sources expect {ct.sizeof(struct)}. Build it again."
            )
    return lib


def implementations() -> dict[str, tuple[Callable[..., None], Callable[..., None]]]:
    """Return {isa: (reshape_and_cache, paged_attention)}, fastest first."""
    lib = load_library()
    store, attend = lib.polykv_reshape_and_cache, lib.polykv_paged_attention
    return {
        lib.polykv_isa_name(i).decode(): (
            partial(_store, partial(store, i)),
            partial(_attend, partial(attend, i)),
        )
        for i in range(lib.polykv_num_isas())
        if lib.polykv_isa_supported(i)
    }


def _cache_struct(kv_cache: torch.Tensor, fmt: FormatSpec, head_dim: int) -> Cache:
    if kv_cache.device.type != "cpu":
        raise ValueError(f"kv_cache must be on the CPU, not on {kv_cache.device}")
    key = (kv_cache.data_ptr(), kv_cache.shape, kv_cache.stride(), kv_cache.dtype)
    return _checked_cache(key, fmt, head_dim)


@lru_cache(maxsize=4096)  # a model's layers; a step asks for the same ones again
def _checked_cache(
    key: tuple[int, torch.Size, tuple[int, ...], torch.dtype],
    fmt: FormatSpec,
    head_dim: int,
) -> Cache:
    address, shape, strides, dtype = key
    if fmt not in FORMATS.values():
        raise NotImplementedError(
            f"no kernel for {fmt}; available: {', '.join(FORMATS)}"
        )
    slot_bytes = fmt.slot_bytes(head_dim)
    validate_cache(shape, strides, dtype, slot_bytes)
    num_blocks, num_kv_heads, block_size, _ = shape
    if block_size % BLOCK_SIZE_MULTIPLE:
        raise ValueError(
            f"block size {block_size} is not a multiple of {BLOCK_SIZE_MULTIPLE}"
        )
    return Cache(
        address,
        num_blocks,
        strides[0],
        strides[1],
        num_kv_heads,
        block_size,
        head_dim,
        Format.of(fmt),
    )


def _check_rows(name: str, rows: torch.Tensor, shape: tuple[int, ...]) -> int:
    """Check `[num_tokens, heads, head_dim]` rows; return the kernel's dtype number."""
    if rows.device.type != "cpu" or rows.dtype not in _DTYPES:
        raise ValueError(
            f"{name} must be bf16, fp16 or fp32 on the CPU, not {rows.dtype} on "
            f"{rows.device}"
        )
    if rows.dim() != 3 or tuple(rows.shape[1:]) != shape or rows.stride(2) != 1:
        heads, head_dim = shape if shape else ("num_heads", "head_dim")
        raise ValueError(
            f"{name} must be [num_tokens, {heads}, {head_dim}] with a contiguous "
            f"last dimension, not {list(rows.shape)} with strides {rows.stride()}"
        )
    return _DTYPES[rows.dtype]


def check_index(name: str, index: torch.Tensor, dtype: torch.dtype, dims: int) -> None:
    """Check a tensor of indices that the library is to read.

    Raises:
        ValueError: It has another dtype, device, number of dimensions or stride.

    """
    if index.dtype != dtype or index.device.type != "cpu" or index.dim() != dims:
        raise ValueError(
            f"{name} must be {dtype} on the CPU with {dims} dimension(s), not "
            f"{index.dtype} on {index.device} with shape {list(index.shape)}"
        )
    if index.numel() and index.stride(-1) != 1:
        raise ValueError(
            f"the last dimension of {name} must be contiguous, not {index.stride()}"
        )


def _check_softmax(scale: float, sliding_window: int) -> None:
    if not 0 < scale < math.inf:
        raise ValueError(f"the softmax scale must be positive and finite, not {scale}")
    if sliding_window < 1 and sliding_window != -1:
        raise ValueError(
            "sliding_window must be a positive number of keys, or -1 for all, not "
            f"{sliding_window}"
        )


def _raise_if(error: bytes | None) -> None:
    if error is not None:
        raise ValueError(error.decode())


def _store(
    kernel: Callable[..., bytes | None],
    key: torch.Tensor,
    value: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    fmt: FormatSpec,
    num_threads: int,
) -> None:
    head_dim = key.shape[-1]
    cache = _cache_struct(kv_cache, fmt, head_dim)
    shape = (cache.num_kv_heads, head_dim)
    dtype = _check_rows("key", key, shape)
    if _check_rows("value", value, shape) != dtype:
        raise ValueError(f"key is {key.dtype}, value {value.dtype}")
    narrow = slot_mapping.dtype == torch.int32
    slots = slot_mapping.to(torch.int64) if narrow else slot_mapping
    check_index("slot_mapping", slots, torch.int64, 1)
    num_tokens = slots.shape[0]
    if min(key.shape[0], value.shape[0]) < num_tokens:
        raise ValueError(
            f"{num_tokens} slots for {key.shape[0]} keys and {value.shape[0]} values"
        )
    args = StoreArgs(
        cache,
        key.data_ptr(),
        value.data_ptr(),
        slots.data_ptr(),
        num_tokens,
        *key.stride()[:2],
        *value.stride()[:2],
        dtype,
        num_threads,
    )
    _raise_if(kernel(ct.byref(args)))


def _attend(
    kernel: Callable[..., bytes | None],
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    output: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    fmt: FormatSpec,
    scale: float,
    sliding_window: int,
    shared: tuple[torch.Tensor, torch.Tensor] | None,
    num_threads: int,
) -> None:
    if query.dim() != 3:
        _check_rows("query", query, ())
    num_rows, num_heads, head_dim = query.shape
    _check_softmax(scale, sliding_window)
    cache = _cache_struct(kv_cache, fmt, head_dim)
    shape = (num_heads, head_dim)
    dtype = _check_rows("query", query, shape)
    if _check_rows("output", output, shape) != dtype:
        raise ValueError(f"query is {query.dtype}, output {output.dtype}")
    if num_heads % cache.num_kv_heads:
        raise ValueError(
            f"{num_heads} query heads are no multiple of {cache.num_kv_heads} KV heads"
        )
    check_index("block_table", block_table, torch.int32, 2)
    check_index("seq_lens", seq_lens, torch.int32, 1)
    check_index("query_start_loc", query_start_loc, torch.int32, 1)
    num_reqs = seq_lens.shape[0]
    if query_start_loc.shape[0] != num_reqs + 1 or block_table.shape[0] < num_reqs:
        raise ValueError(
            f"{num_reqs} requests with {query_start_loc.shape[0]} query offsets and "
            f"{block_table.shape[0]} block table rows"
        )
    if shared is None:
        segments = readers = _NOTHING_SHARED
    else:
        segments, readers = shared
        check_index("segments", segments, torch.int32, 2)
        check_index("readers", readers, torch.int32, 1)
        if segments.shape[1] != 4 or not segments.is_contiguous():
            raise ValueError(
                "segments must be contiguous [num_segments, 4], not "
                f"{list(segments.shape)} with strides {segments.stride()}"
            )
    args = AttentionArgs(
        cache,
        query.data_ptr(),
        output.data_ptr(),
        block_table.data_ptr(),
        seq_lens.data_ptr(),
        query_start_loc.data_ptr(),
        *query.stride()[:2],
        *output.stride()[:2],
        segments.data_ptr(),
        readers.data_ptr(),
        readers.shape[0],
        block_table.stride(0),
        min(num_rows, output.shape[0]),
        block_table.shape[1],
        num_reqs,
        segments.shape[0],
        num_heads,
        sliding_window,
        dtype,
        scale,
        num_threads,
    )
    _raise_if(kernel(ct.byref(args)))

# SPDX-License-Identifier: Apache-2.0
"""The C++ kernels: loads the library, checks arguments, hands over pointers.

The library is plain C (ctypes), not a torch extension: it depends on no torch ABI,
so one wheel serves CPU and CUDA builds of any torch. Dtypes, shapes and strides are
checked here, the values of indices by the library (csrc/cpu/check.cpp). Both run once
per layer and step, so a layer keeps its arguments and checks what is new about them.
"""

import ctypes as ct
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from polykv_vllm.formats import BLOCK_SIZE_MULTIPLE, FORMATS, FormatSpec
from polykv_vllm.keys import KeyTransform
from polykv_vllm.ops._checks import check_index
from polykv_vllm.ops._structs import (
    AttentionArgs,
    Cache,
    ForestArgs,
    Format,
    LogitStruct,
    RowTransform,
    StoreArgs,
)
from polykv_vllm.ops.batch import AttentionBatch
from polykv_vllm.ops.logits import LogitTerms
from polykv_vllm.ops.table import validate_cache
from polykv_vllm.ops.windows import RawRows, check_windows

LIBRARY = Path(__file__).resolve().parent.parent / "_C.so"

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


def compiled_isas() -> tuple[str, ...]:
    """Return the instruction sets in this build, whether this CPU has them or not."""
    lib = load_library()
    return tuple(lib.polykv_isa_name(i).decode() for i in range(lib.polykv_num_isas()))


def implementations() -> dict[str, tuple[Callable[..., Any], Callable[..., Any]]]:
    """Return {isa: (makes a layer's store, makes its attention)}, fastest first."""
    lib = load_library()
    return {
        name: (
            partial(LayerStore, partial(lib.polykv_reshape_and_cache, i)),
            partial(LayerAttention, partial(lib.polykv_paged_attention, i)),
        )
        for i, name in enumerate(compiled_isas())
        if lib.polykv_isa_supported(i)
    }


def _cache_struct(kv_cache: torch.Tensor, fmt: FormatSpec, head_dim: int) -> Cache:
    if kv_cache.device.type != "cpu":
        raise ValueError(f"kv_cache must be on the CPU, not on {kv_cache.device}")
    if fmt not in FORMATS.values():
        raise NotImplementedError(
            f"no kernel for {fmt}; available: {', '.join(FORMATS)}"
        )
    slot_bytes = fmt.slot_bytes(head_dim)
    validate_cache(kv_cache.shape, kv_cache.stride(), kv_cache.dtype, slot_bytes)
    num_blocks, num_kv_heads, block_size, _ = kv_cache.shape
    if block_size % BLOCK_SIZE_MULTIPLE:
        raise ValueError(
            f"block size {block_size} is not a multiple of {BLOCK_SIZE_MULTIPLE}"
        )
    return Cache(
        kv_cache.data_ptr(),
        num_blocks,
        *kv_cache.stride()[:2],
        num_kv_heads,
        block_size,
        head_dim,
        Format.of(fmt, head_dim),
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


def _row_transform(
    centers: torch.Tensor | None,
    multipliers: torch.Tensor | None,
    matrices: torch.Tensor | None,
    rotate: bool,
) -> tuple[RowTransform, list[torch.Tensor | None]]:
    """Return the struct and the tensors it points to, which have to stay."""
    kept = [
        None if each is None else each.float().cpu().contiguous()
        for each in (centers, multipliers, matrices)
    ]
    pointers = (None if each is None else each.data_ptr() for each in kept)
    return RowTransform(*pointers, rotate), kept


def _logit_struct(terms: LogitTerms) -> LogitStruct:
    """Return the struct; the tensors that it points to are those of `terms`."""
    slopes, sinks = terms.alibi_slopes, terms.sinks
    return LogitStruct(
        None if slopes is None else slopes.data_ptr(),
        None if sinks is None else sinks.data_ptr(),
        terms.soft_cap,
    )


def _raise_if(error: bytes | None) -> None:
    if error is not None:
        raise ValueError(error.decode())


def _form(rows: torch.Tensor) -> tuple[Any, ...]:
    """Return what was checked of rows: equal forms need no second check."""
    return rows.shape, rows.stride(), rows.dtype, rows.device


class LayerStore:
    """See `ops.layer_store`. The struct stays; what changed is checked and set."""

    def __init__(
        self,
        kernel: Callable[..., bytes | None],
        fmt: FormatSpec,
        num_threads: int,
        key_transform: KeyTransform | None,
    ) -> None:
        self._kernel, self._fmt = kernel, fmt
        self._transform = key_transform or KeyTransform()
        struct, self._kept = _row_transform(
            self._transform.centers,
            self._transform.key_multipliers,
            self._transform.key_matrices,
            self._transform.rotate,
        )
        self._args = StoreArgs(num_threads=num_threads, key_transform=struct)
        self._ref = ct.byref(self._args)
        self._cache: torch.Tensor | None = None
        self._slots: torch.Tensor | None = None
        self._forms: tuple[Any, ...] = ()

    def __call__(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Quantize and scatter; arguments as in `ops.reshape_and_cache`."""
        args = self._args
        forms = (_form(key), _form(value))
        if kv_cache is not self._cache or forms != self._forms:
            self._cache = None  # until all of it is known to be right
            self._bind(key, value, kv_cache)
            self._cache, self._forms = kv_cache, forms
        if slot_mapping is not self._slots:
            self._slots = None
            slots = slot_mapping
            if slots.dtype == torch.int32:
                slots = slots.long()
            check_index("slot_mapping", slots, torch.int64, 1)
            args.slot_mapping, args.num_tokens = slots.data_ptr(), slots.shape[0]
            # A converted copy is kept, and made anew should its source be reused.
            self._slots = slots
        if min(key.shape[0], value.shape[0]) < args.num_tokens:
            raise ValueError(
                f"{args.num_tokens} slots for {key.shape[0]} keys and "
                f"{value.shape[0]} values"
            )
        args.key, args.value = key.data_ptr(), value.data_ptr()
        _raise_if(self._kernel(self._ref))

    def _bind(
        self, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor
    ) -> None:
        args, head_dim = self._args, key.shape[-1]
        args.cache = _cache_struct(kv_cache, self._fmt, head_dim)
        shape = (args.cache.num_kv_heads, head_dim)
        self._transform.check_shape(*shape)
        args.dtype = _check_rows("key", key, shape)
        if _check_rows("value", value, shape) != args.dtype:
            raise ValueError(f"key is {key.dtype}, value {value.dtype}")
        args.key_token_stride, args.key_head_stride = key.stride()[:2]
        args.value_token_stride, args.value_head_stride = value.stride()[:2]


class LayerAttention:
    """See `ops.layer_attention`. The struct stays; what changed is checked and set."""

    def __init__(
        self,
        kernel: Callable[..., bytes | None],
        fmt: FormatSpec,
        scale: float,
        sliding_window: int,
        fast: bool,
        num_threads: int,
        key_transform: KeyTransform | None,
        logits: LogitTerms | None,
    ) -> None:
        self._logits = logits or LogitTerms()
        self._kernel, self._fmt = kernel, fmt
        self._transform = key_transform or KeyTransform()
        self._logits.check_transform(self._transform)
        struct, self._kept = _row_transform(
            self._transform.centers,
            self._transform.scales,
            self._transform.query_matrices,
            self._transform.rotate,
        )
        self._args = AttentionArgs(
            scale=scale,
            sliding_window=sliding_window,
            fast=fast,
            num_threads=num_threads,
            query_transform=struct,
            logits=_logit_struct(self._logits),
        )
        self._ref = ct.byref(self._args)
        self._cache: torch.Tensor | None = None
        self._batch: AttentionBatch | None = None
        self._forms: tuple[Any, ...] = ()

    def __call__(
        self,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        output: torch.Tensor,
        batch: AttentionBatch,
        raw: RawRows | None = None,
    ) -> None:
        """Attend; arguments as in `ops.paged_attention`."""
        check_windows(batch.windows, raw)
        args = self._args
        forms = (_form(query), _form(output))
        if kv_cache is not self._cache or forms != self._forms:
            self._cache = None  # until all of it is known to be right
            self._bind(query, kv_cache, output)
            self._cache, self._forms = kv_cache, forms
        if batch is not self._batch:
            for name, value in batch.fields:
                setattr(args, name, value)
            self._batch = batch
        if raw is not None:
            raw.check(query, kv_cache.shape[1])
            args.raw = raw.struct()
        args.query, args.output = query.data_ptr(), output.data_ptr()
        _raise_if(self._kernel(self._ref))

    def _bind(
        self, query: torch.Tensor, kv_cache: torch.Tensor, output: torch.Tensor
    ) -> None:
        if query.dim() != 3:
            _check_rows("query", query, ())
        args = self._args
        num_rows, num_heads, head_dim = query.shape
        args.cache = _cache_struct(kv_cache, self._fmt, head_dim)
        self._transform.check_shape(args.cache.num_kv_heads, head_dim)
        shape = (num_heads, head_dim)
        args.dtype = args.query_dtype = _check_rows("query", query, shape)
        if _check_rows("output", output, shape) != args.dtype:
            raise ValueError(f"query is {query.dtype}, output {output.dtype}")
        if num_heads % args.cache.num_kv_heads:
            raise ValueError(
                f"{num_heads} query heads are no multiple of "
                f"{args.cache.num_kv_heads} KV heads"
            )
        self._logits.check_heads(num_heads)
        args.num_heads = num_heads
        args.num_rows = min(num_rows, output.shape[0])
        args.query_token_stride, args.query_head_stride = query.stride()[:2]
        args.output_token_stride, args.output_head_stride = output.stride()[:2]

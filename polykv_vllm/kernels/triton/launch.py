# SPDX-License-Identifier: Apache-2.0
"""The operations of one layer on a GPU: checks, scratch memory, launches.

Scratch memory is in `scratch.py`, checks are in `arguments.py`.
"""

import weakref
from contextlib import nullcontext
from functools import cache
from typing import Any

import torch

from polykv_vllm.formats import FormatSpec
from polykv_vllm.kernels.triton import config
from polykv_vllm.kernels.triton.arguments import (
    DTYPES,
    check_logits,
    check_transform,
    kernel_rows,
    kernel_tile,
    on_device,
)
from polykv_vllm.kernels.triton.assembly import PLAIN, assembly_of
from polykv_vllm.kernels.triton.attend import (
    attend_kernel,
    finish_kernel,
    prepare_kernel,
)
from polykv_vllm.kernels.triton.config import INTERPRETER, DeviceConfig, device_config
from polykv_vllm.kernels.triton.plan import (
    SPLIT_TOKENS,
    AttentionPlan,
    build_plan,
    plan_bounds,
)
from polykv_vllm.kernels.triton.scratch import (
    heads_in_flight,
    query_buffers,
    state_buffers,
)
from polykv_vllm.kernels.triton.store import store_kernel
from polykv_vllm.kernels.triton.tile import Tile
from polykv_vllm.keys import KeyTransform

PROGRAMS_PER_PROCESSOR = 8
PREPARE_ROWS = 8

_LOG2_E = 1.44269504

# By batch, then by shape of the layer.
_PLANS: weakref.WeakKeyDictionary[Any, dict[tuple[int, int, int], AttentionPlan]] = (
    weakref.WeakKeyDictionary()
)
# The reference and the CPU kernels multiply and add in two roundings.
_EXACT = {"enable_fp_fusion": False}


@cache
def _device(index: int | None) -> tuple[DeviceConfig, int]:
    """Return what a CUDA device uses, and how many programs a persistent grid has."""
    properties = torch.cuda.get_device_properties(index)
    capability = 10 * properties.major + properties.minor
    programs = properties.multi_processor_count * PROGRAMS_PER_PROCESSOR
    return device_config(capability), programs


def _device_of(tensor: torch.Tensor) -> tuple[DeviceConfig, int]:
    if tensor.device.type == "cuda":
        return _device(tensor.device.index)
    return INTERPRETER, 2


def _on(tensor: torch.Tensor) -> Any:
    is_cuda = tensor.device.type == "cuda"
    return torch.cuda.device(tensor.device) if is_cuda else nullcontext()


class LayerStore:
    """See `ops.layer_store`; tensors on one CUDA device (CPU: the interpreter)."""

    def __init__(
        self, fmt: FormatSpec, num_threads: int, key_transform: KeyTransform | None
    ) -> None:
        del num_threads
        self._fmt, self._transform = fmt, key_transform or KeyTransform()
        check_transform(self._transform)
        self._multipliers = self._transform.key_multipliers

    def __call__(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Quantize and scatter; arguments as in `ops.reshape_and_cache`."""
        head_dim, heads = key.shape[-1], kv_cache.shape[1]
        tile = kernel_tile(kv_cache, self._fmt, head_dim)
        self._transform.check_shape(heads, head_dim)
        if key.dtype != value.dtype:
            raise ValueError(f"key is {key.dtype}, value {value.dtype}")
        keys = kernel_rows("key", key, (heads, head_dim))
        values = kernel_rows("value", value, (heads, head_dim))
        num_tokens = slot_mapping.shape[0]
        if min(key.shape[0], value.shape[0]) < num_tokens:
            raise ValueError(
                f"{num_tokens} slots for {key.shape[0]} keys and "
                f"{value.shape[0]} values"
            )
        if num_tokens == 0:
            return
        self._multipliers = on_device(self._multipliers, key)
        tokens = config.store_tokens(head_dim)
        with _on(key):
            store_kernel[(-(-num_tokens // tokens), heads)](
                keys,
                values,
                kv_cache,
                slot_mapping,
                self._multipliers if self._multipliers is not None else keys,
                num_tokens,
                *keys.stride()[:2],
                *values.stride()[:2],
                *kv_cache.stride()[:2],
                head_dim**-0.5,
                tile,
                DTYPES[key.dtype],
                self._multipliers is not None,
                self._transform.rotate,
                tokens,
                num_warps=4,
                **_EXACT,
            )


class LayerAttention:
    """See `ops.layer_attention`; tensors on one CUDA device (CPU: the interpreter)."""

    def __init__(
        self,
        fmt: FormatSpec,
        scale: float,
        sliding_window: int,
        fast: bool,
        num_threads: int,
        key_transform: KeyTransform | None,
        logits: Any = None,
    ) -> None:
        del num_threads
        check_logits(logits)
        if fast:
            raise NotImplementedError(
                "the Triton kernels have no fast mode (8-bit probabilities); the CPU "
                "kernels have"
            )
        self._fmt, self._scale, self._window = fmt, scale, sliding_window
        self._transform = key_transform or KeyTransform()
        check_transform(self._transform)
        self._multipliers = self._transform.scales

    def __call__(
        self,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        output: torch.Tensor,
        batch: Any,
        raw: Any = None,
    ) -> None:
        """Attend; `batch` is an `ops.AttentionBatch`, or an `ops.DeviceBatch`.

        Other arguments as in ops.
        """
        if raw is not None or getattr(batch, "windows", None) is not None:
            raise NotImplementedError(
                "the Triton kernels have no full-precision windows; isa 'reference' "
                "has, on the CPU"
            )
        group = query.shape[1] // kv_cache.shape[1]
        block_size = kv_cache.shape[2]
        plan = plan_of(batch, group, block_size, self._window, query.device)
        self.run(query, kv_cache, output, plan)

    def reserve(
        self, query: torch.Tensor, num_kv_heads: int, num_reqs: int, max_seq_len: int
    ) -> None:
        """Take the scratch memory of a full batch, before others share out the rest.

        Args:
            query: `[num_tokens, num_heads, head_dim]` of the largest batch.
            num_kv_heads: KV heads.
            num_reqs: Requests that decode at once.
            max_seq_len: Tokens of the longest request.

        """
        num_tokens, heads, head_dim = query.shape
        group = heads // num_kv_heads
        slots = max(num_tokens, num_reqs * -(-max_seq_len // SPLIT_TOKENS))
        flight = heads_in_flight(slots, group, head_dim, num_kv_heads)
        query_buffers(num_tokens * heads, head_dim, query.device)
        state_buffers(flight * slots * group, head_dim, query.device)

    def run(
        self,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        output: torch.Tensor,
        plan: AttentionPlan,
    ) -> None:
        """Attend with a plan that is already on the device."""
        _, heads, head_dim = query.shape
        kv_heads = kv_cache.shape[1]
        tile = kernel_tile(kv_cache, self._fmt, head_dim)
        self._transform.check_shape(kv_heads, head_dim)
        if heads % kv_heads or heads // kv_heads != plan.group:
            raise ValueError(
                f"{heads} query heads and {kv_heads} KV heads do not fit a plan for "
                f"{plan.group} query heads per KV head"
            )
        if query.dtype != output.dtype:
            raise ValueError(f"query is {query.dtype}, output {output.dtype}")
        rows = kernel_rows("query", query, (heads, head_dim))
        out = kernel_rows("output", output, (heads, head_dim))
        if plan.tokens.numel() == 0:
            return
        self._multipliers = on_device(self._multipliers, query)
        with _on(query):
            prepared = self._prepare(rows, query.dtype, tile, plan)
            flight = heads_in_flight(plan.num_slots, plan.group, head_dim, kv_heads)
            for first in range(0, kv_heads, flight):
                turn = (first, min(flight, kv_heads - first))
                states = self._attend(prepared, kv_cache, heads, tile, plan, turn)
                self._finish(out, output.dtype, prepared[1], states, tile, plan, turn)

    def _prepare(
        self, rows: torch.Tensor, dtype: torch.dtype, tile: Tile, plan: AttentionPlan
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the int8 terms of the queries, their scales and corrections."""
        count = plan.token_end.numel() * rows.shape[1]
        device, dim = rows.device, tile.head_dim
        terms, scale, correction = query_buffers(count, dim, device)
        prepare_kernel[(-(-count // PREPARE_ROWS),)](
            rows,
            terms,
            scale,
            correction,
            self._multipliers if self._multipliers is not None else scale,
            count,
            *rows.stride()[:2],
            dim**-0.5,
            self._scale * _LOG2_E,
            tile,
            rows.shape[1],
            plan.group,
            DTYPES[dtype],
            self._multipliers is not None,
            self._transform.rotate,
            PREPARE_ROWS,
            num_warps=4,
            **_EXACT,
        )
        return terms, scale, correction

    def _attend(
        self,
        prepared: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        kv_cache: torch.Tensor,
        heads: int,
        tile: Tile,
        plan: AttentionPlan,
        turn: tuple[int, int],
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the partial states of the turn's KV heads."""
        device, programs = _device_of(kv_cache)
        count = turn[1] * plan.num_slots * plan.group
        states = state_buffers(count, tile.head_dim, kv_cache.device)
        assembly = assembly_of(tile) if device.assembly else PLAIN
        for work in plan.lists:
            if work.items.shape[0] == 0:
                continue
            launch = config.attend_config(device, self._fmt, tile.head_dim, work.rows)
            attend_kernel[(min(programs, work.items.shape[0]), turn[1])](
                *prepared,
                kv_cache.view(torch.int8),
                plan.block_table,
                work.items,
                work.count,
                plan.item_tokens,
                plan.token_end,
                plan.token_slot,
                plan.token_split,
                *states,
                plan.num_slots,
                plan.block_table.stride(0),
                *kv_cache.stride()[:2],
                turn[0],
                max(self._window, 0),
                tile,
                assembly,
                heads,
                plan.group,
                work.rows,
                work.rows == 8,
                device.int8,
                num_warps=launch.num_warps,
                num_stages=launch.num_stages,
                **_EXACT,
            )
        return states

    def _finish(
        self,
        out: torch.Tensor,
        dtype: torch.dtype,
        row_scale: torch.Tensor,
        states: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        tile: Tile,
        plan: AttentionPlan,
        turn: tuple[int, int],
    ) -> None:
        finish_kernel[(plan.tokens.numel(), turn[1])](
            out,
            row_scale,
            plan.tokens,
            plan.token_slot,
            plan.token_parts,
            *states,
            plan.num_tokens,
            plan.num_slots,
            *out.stride()[:2],
            turn[0],
            tile.head_dim**-0.5,
            tile,
            out.shape[1],
            plan.group,
            DTYPES[dtype],
            1 << (plan.group - 1).bit_length(),
            num_warps=2,
            **_EXACT,
        )


def plan_of(
    batch: Any, group: int, block_size: int, window: int, device: torch.device
) -> AttentionPlan:
    """Return the plan of an `ops.AttentionBatch` or `ops.DeviceBatch`.

    It is made once for all layers of the same shape.
    """
    plans = _PLANS.setdefault(batch, {})
    key = (group, block_size, window)
    if key not in plans:
        plans[key] = build_plan(
            batch.block_table.to(device),
            batch.seq_lens.to(device),
            batch.query_start_loc.to(device),
            group,
            block_size,
            window,
            bounds=plan_bounds(
                batch.host_seq_lens, batch.host_query_start_loc, group, window
            ),
            share=batch.share,
        )
    return plans[key]

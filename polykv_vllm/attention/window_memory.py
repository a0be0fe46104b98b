# SPDX-License-Identifier: Apache-2.0
"""Sets aside memory for windows before vLLM divides the rest into blocks.

In the engine core the number of sequences is settled, and vLLM is given what
is left of the cache memory. The plan goes to the workers with the configuration of the
cache; they make the pages when they make their caches.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from vllm.logger import init_logger
from vllm.v1.kv_cache_interface import AttentionSpec

from polykv_vllm.attention.backend import CACHE_TORCH_DTYPE
from polykv_vllm.attention.impl import own_impls
from polykv_vllm.attention.metadata import PolyKVMetadataBuilder
from polykv_vllm.attention.sharing import group_window
from polykv_vllm.attention.windows import GroupWindows, StepRequests
from polykv_vllm.config import parse_options
from polykv_vllm.pool.disk.messages import Orders
from polykv_vllm.windows.sizes import (
    PAGE_TOKENS,
    PLAN_ATTRIBUTE,
    WindowPlan,
    page_bytes,
    plan_windows,
)

logger = init_logger("vllm.polykv")


def reserve_pages(
    vllm_config: Any,
    kv_cache_specs: Sequence[Mapping[str, Any]],
    available_memory: Sequence[int],
) -> tuple[WindowPlan | None, list[int]]:
    """Return the plan, None without windows, and the memory that is left.

    The scheduler, which is made later from the same configuration, is told how many
    sequences may run at once.

    Args:
        vllm_config: vLLM's `VllmConfig`.
        kv_cache_specs: Of each worker's layers.
        available_memory: Of each worker, in bytes.

    Raises:
        WindowError: The memory is too small.

    """
    windows = parse_options(vllm_config.additional_config).windows
    if windows is None or not windows.is_used:
        return None, list(available_memory)
    itemsize = vllm_config.model_config.dtype.itemsize
    sizes = [
        sum(_page_bytes(spec, itemsize) for spec in specs.values())
        for specs in kv_cache_specs
    ]
    scheduler = vllm_config.scheduler_config
    asked = windows.max_sequences
    plan = plan_windows(
        windows.sizes(vllm_config.num_speculative_tokens),
        sizes,
        available_memory,
        min(scheduler.max_num_seqs, asked or scheduler.max_num_seqs),
        asked is not None,
    )
    taken = [size * plan.num_pages for size in sizes]
    _tell(plan, taken, available_memory, scheduler.max_num_seqs)
    scheduler.max_num_seqs = plan.num_sequences
    if scheduler.max_num_active_seqs is not None:
        scheduler.max_num_active_seqs = min(
            scheduler.max_num_active_seqs, plan.num_sequences
        )
    left = [memory - used for memory, used in zip(available_memory, taken, strict=True)]
    return plan, left


def make_pages(runner: Any, plan: WindowPlan | None) -> None:
    """Give the layers of a worker their pages, and its metadata builders the table.

    Args:
        runner: vLLM's model runner, with its cache and builders.
        plan: Of the engine; None without windows.

    """
    groups: list[GroupWindows] = []
    setattr(runner, PLAN_ATTRIBUTE, groups)
    if plan is None:
        return
    layers = runner.compilation_config.static_forward_context
    impls = own_impls(layers)
    specs = [group.kv_cache_spec for group in runner.kv_cache_config.kv_cache_groups]
    for spec, attention_groups in zip(specs, runner.attn_groups, strict=True):
        for group in attention_groups:
            builder = group.get_metadata_builder()
            if not isinstance(builder, PolyKVMetadataBuilder):
                continue
            own = builder.kv_cache_spec
            builder.windows = GroupWindows(
                plan,
                own.block_size,
                spec.block_size // PAGE_TOKENS,
                group_window(own),
            )
            groups.append(builder.windows)
            for name in group.layer_names:
                impls[name].window_cache = _pages(plan, own, runner.dtype)


def announce_step(runner: Any, scheduler_output: Any) -> None:
    """Tell the windows of a worker who runs in the step that begins.

    Args:
        runner: vLLM's model runner, its batch being that of the step.
        scheduler_output: vLLM's `SchedulerOutput`.

    """
    groups: Sequence[GroupWindows] = getattr(runner, PLAN_ATTRIBUTE, ())
    if not groups:
        return
    # Sorted: all ranks are to give up the same pages.
    ended = {
        *scheduler_output.finished_req_ids,
        *(scheduler_output.preempted_req_ids or ()),
    }
    restored = [
        copy.dst_block_id for copy in scheduler_output.kv_cache_block_copies or ()
    ]
    orders = scheduler_output.kv_connector_metadata
    if isinstance(orders, Orders):
        restored += [block.block_id for block in orders.load]
    step = StepRequests(list(runner.input_batch.req_ids), sorted(ended), restored)
    for group in groups:
        group.begin_step(step)


def _page_bytes(spec: Any, itemsize: int) -> int:
    """Return the bytes of a page in one layer; 0 where the cache is not ours."""
    if not isinstance(spec, AttentionSpec) or spec.dtype != CACHE_TORCH_DTYPE:
        return 0
    return page_bytes(spec.num_kv_heads, spec.head_size, itemsize)


def _pages(plan: WindowPlan, spec: Any, dtype: torch.dtype) -> torch.Tensor:
    """Return one layer's pages, zero: no place may hold a NaN."""
    shape = (plan.num_pages, 2, spec.num_kv_heads, PAGE_TOKENS, spec.head_size)
    return torch.zeros(shape, dtype=dtype)


def _tell(
    plan: WindowPlan, taken: Sequence[int], memory: Sequence[int], asked: int
) -> None:
    sizes = plan.sizes
    logger.info(
        "Windows of full precision: the first %d and last %d tokens of a sequence; "
        "%d pages of %d tokens for %d sequences, %.1f MiB (%.0f%% of the cache memory)",
        sizes.sink_tokens,
        sizes.recent_tokens,
        plan.num_pages,
        PAGE_TOKENS,
        plan.num_sequences,
        max(taken) / 2**20,
        100 * max(used / total for used, total in zip(taken, memory, strict=True)),
    )
    if plan.num_sequences < asked:
        logger.warning(
            "At most %d sequences run at once, not --max-num-seqs %d: more pages would "
            "take more than their share of the cache memory. The option "
            "windows.max_sequences sets another number",
            plan.num_sequences,
            asked,
        )

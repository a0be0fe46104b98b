# SPDX-License-Identifier: Apache-2.0
"""Chooses the scheduler that keeps one physical copy of a block.

vLLM lets a configuration name the scheduler's class, so nothing of vLLM is replaced.
"""

import logging
from typing import Any

from polykv_vllm.config import PolyKVConfig
from polykv_vllm.errors import UnsupportedError

logger = logging.getLogger("vllm.polykv")

SCHEDULER = "polykv_vllm.pool.scheduler.SingleCopyScheduler"

eligible: set[str] = set()
"""Our schedulers whose base class in vLLM is the expected one (seams/scheduler.py)."""


def select_scheduler(vllm_config: Any, options: PolyKVConfig) -> None:
    """Name our scheduler unless the option, or the user's own class, is against it.

    Args:
        vllm_config: vLLM's `VllmConfig` of an engine with one of our cache dtypes.
        options: Our options in it.

    Raises:
        UnsupportedError: `single_copy` was asked for by name and cannot be had.

    """
    if not options.single_copy or not vllm_config.cache_config.enable_prefix_caching:
        return
    scheduler_config = vllm_config.scheduler_config
    if scheduler_config.scheduler_cls == SCHEDULER:
        return
    if SCHEDULER not in eligible:
        obstacle = "a vLLM whose scheduler is another one than expected"
    elif scheduler_config.scheduler_cls is not None:
        obstacle = f"--scheduler-cls {scheduler_config.scheduler_cls}"
    elif scheduler_config.async_scheduling:
        obstacle = "--async-scheduling"
    elif vllm_config.model_config.is_hybrid:
        # Its states are cached at few places only; waiting for one was not tested.
        obstacle = "a model with linear attention"
    else:
        scheduler_config.scheduler_cls = SCHEDULER
        return
    if "single_copy" in options.model_fields_set:
        raise UnsupportedError(
            f"the option single_copy=true cannot be had with {obstacle}: it needs a "
            "scheduler of its own; leave one of the two away"
        )
    logger.warning(
        "%s: requests that arrive together may keep several copies of a shared "
        "prefix; polykv's option single_copy has no effect",
        obstacle,
    )

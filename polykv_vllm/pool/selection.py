# SPDX-License-Identifier: Apache-2.0
"""Chooses the scheduler that keeps one physical copy, and the connector of the pool.

vLLM lets a configuration name both classes, so nothing of vLLM is replaced.
"""

import logging
import os
from typing import Any

from polykv_vllm.config import PolyKVConfig, parse_options
from polykv_vllm.errors import UnsupportedError
from polykv_vllm.support import check_model

logger = logging.getLogger("vllm.polykv")

CONNECTOR_MODULE = "polykv_vllm.pool.disk.connector"
CONNECTOR = "PolyKVPoolConnector"
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


def choose_connector(engine_args: Any) -> None:
    """Name our connector if blocks are to be kept on disk.

    Args:
        engine_args: vLLM's `EngineArgs`, before a configuration is made of them.

    Raises:
        UnsupportedError: The option `pool.path` cannot be had with other arguments.

    """
    if parse_options(engine_args.additional_config).pool.path is None:
        return
    asked = engine_args.kv_transfer_config
    if asked is not None and asked.kv_connector == CONNECTOR:
        return
    obstacles = []
    if asked is not None:
        obstacles.append(f"another KV connector ({asked.kv_connector})")
    if engine_args.enable_prefix_caching is False:
        obstacles.append("--no-enable-prefix-caching")
    if engine_args.kv_cache_dtype_skip_layers:
        obstacles.append("--kv-cache-dtype-skip-layers")
    if (size := engine_args.pipeline_parallel_size) > 1:
        obstacles.append(f"--pipeline-parallel-size {size}")
    if engine_args.speculative_config:
        obstacles.append("--speculative-config")
    if obstacles:
        raise UnsupportedError(
            f"the option pool.path cannot be had with {'; '.join(obstacles)}: leave "
            "one of the two away"
        )
    from vllm.config import KVTransferConfig

    engine_args.kv_transfer_config = KVTransferConfig(
        kv_connector=CONNECTOR,
        kv_connector_module_path=CONNECTOR_MODULE,
        kv_role="kv_both",
        kv_load_failure_policy="recompute",
    )


def check_layers(vllm_config: Any) -> None:
    """Refuse sliding windows before the engine starts.

    Raises:
        UnsupportedError: Blocks are to be kept on disk, and the model's cache is not
            that of full attention alone.

    """
    if parse_options(vllm_config.additional_config).pool.path is None:
        return
    cache_dtype = vllm_config.cache_config.cache_dtype
    support = check_model(vllm_config.model_config.hf_text_config, cache_dtype)
    if support.num_sliding_layers:
        raise UnsupportedError(
            f"the option pool.path cannot be had with {support.num_sliding_layers} "
            "layers with sliding windows, of which vLLM keeps only the last blocks; "
            "possible: models with full attention in all layers"
        )


def check_prefixes(additional_config: Any) -> None:
    """Refuse a file of prefixes that nobody would read, or that is none.

    Raises:
        OptionError: The file cannot be read.
        UnsupportedError: The routes, which compute prefixes, are not loaded.

    """
    path = parse_options(additional_config).pool.prefixes
    if path is None:
        return
    from polykv_vllm.pool.http.spec import read_prefix_file

    read_prefix_file(path)
    if "polykv" not in os.environ.get("VLLM_PLUGINS", "").split(","):
        raise UnsupportedError(
            "the option pool.prefixes needs the routes of the pool, which vllm serve "
            "loads when told to: set VLLM_PLUGINS=polykv"
        )

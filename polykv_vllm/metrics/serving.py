# SPDX-License-Identifier: Apache-2.0
"""Brings the collector into the front end, and the directory's name to the workers.

A server is a tree of processes: `vllm serve`, from which API servers (if several are
asked for) and engine cores are started, and from those the workers. The first of them
makes the directory and names it in the environment, which the others inherit. Each API
server reads the same files, so any of them answers a scrape for the whole server.
"""

import logging
import os
from typing import Any

from prometheus_client import REGISTRY, CollectorRegistry

from polykv_vllm import envs
from polykv_vllm.metrics.collector import PolyKVCollector
from polykv_vllm.metrics.directory import ServerDirectory

logger = logging.getLogger("vllm.polykv")

_directory: ServerDirectory | None = None
_collector: PolyKVCollector | None = None


def start(vllm_config: Any) -> None:
    """Collect the figures of the engine that this configuration will start.

    It takes the place of the engine before it in this process, as vLLM's own metrics
    do. Without a place for the directory there are no metrics of ours, and a warning.

    Args:
        vllm_config: vLLM's `VllmConfig`, with one of our cache dtypes.

    """
    global _directory, _collector
    is_started_by_another = _is_one_of_several_api_servers(vllm_config.parallel_config)
    path = envs.metrics_dir() if is_started_by_another else None
    stop()
    if not is_started_by_another:
        try:
            _directory = ServerDirectory()
        except OSError as error:
            logger.warning("/metrics will not have vllm:polykv_*: %s", error)
            return
        path = _directory.path
    if path is None:  # the process that started this one has warned
        return
    os.environ[envs.METRICS_DIR] = str(path)
    _collector = PolyKVCollector(path, vllm_config.model_config.served_model_name)
    REGISTRY.register(_collector)


def stop() -> None:
    """Collect no longer; the directory goes if this process made it."""
    global _directory, _collector
    if _collector is not None:
        REGISTRY.unregister(_collector)
        _collector = None
    if _directory is not None:
        _directory.remove()
        _directory = None
    os.environ.pop(envs.METRICS_DIR, None)


def add_to(registry: CollectorRegistry) -> None:
    """Let a registry that is about to be served show our metrics, if there are any.

    Args:
        registry: One made for several API servers. Prometheus' default one, which has
            them already, is left alone.

    """
    if _collector is not None and registry is not REGISTRY:
        registry.register(_collector)


def _is_one_of_several_api_servers(parallel_config: Any) -> bool:
    # Started with a place among the others; their parent has the rank -1.
    count, rank = parallel_config._api_process_count, parallel_config._api_process_rank
    return count > 1 and rank >= 0

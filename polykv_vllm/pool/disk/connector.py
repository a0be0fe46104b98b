# SPDX-License-Identifier: Apache-2.0
"""What vLLM calls: one class, of which the scheduler and each worker have an object."""

from pathlib import Path
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.forward_context import ForwardContext
from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from polykv_vllm.attention.key_treatment import loaded_models
from polykv_vllm.config import parse_options
from polykv_vllm.errors import UnsupportedError
from polykv_vllm.pool import adapters
from polykv_vllm.pool.disk.describe import identify
from polykv_vllm.pool.disk.messages import Orders, RankAnswer
from polykv_vllm.pool.disk.planner import Planner
from polykv_vllm.pool.disk.stats import PoolMetrics, PoolStats
from polykv_vllm.pool.disk.worker import PoolWorker, open_worker
from polykv_vllm.pool.pins import PrefixPool


class PolyKVPoolConnector(KVConnectorBase_V1, SupportsHMA):
    """Keeps full blocks on disk and finds them again.

    It declares `SupportsHMA` so that vLLM treats the model as without it; models with
    more than one KV cache group are refused.
    """

    _cache_hit_source = CacheHitSource.DISK

    def __init__(
        self,
        vllm_config: VllmConfig,
        role: KVConnectorRole,
        kv_cache_config: KVCacheConfig,
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        groups = kv_cache_config.kv_cache_groups
        specs = [group.kv_cache_spec for group in groups]
        if len(specs) != 1 or not isinstance(specs[0], FullAttentionSpec):
            kinds = ", ".join(type(spec).__name__ for spec in specs)
            raise UnsupportedError(
                f"the option pool.path cannot be had with the KV cache groups {kinds}; "
                "possible: one group of full attention, as most models have"
            )
        self._options = parse_options(vllm_config.additional_config).pool
        self._worker: PoolWorker | None = None
        self._planner = Planner(specs[0].block_size)
        if role == KVConnectorRole.SCHEDULER:
            adapters.watch()

    # The workers' side.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Open the store of this rank."""
        assert self._options.path is not None
        world_size = self._vllm_config.parallel_config.world_size
        self._worker = open_worker(
            kv_caches,
            lambda layers: identify(self._vllm_config, layers),
            Path(self._options.path).expanduser(),
            self._options.max_bytes // world_size,
            loaded_models,
        )

    def get_handshake_metadata(self) -> RankAnswer:
        """Tell the scheduler where this rank has its blocks."""
        directory = str(self._worker.store.rank) if self._worker else None
        return RankAnswer(directory)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Fill the blocks that the step needs; its forward waits for them."""
        if self._worker is not None:
            self._worker.load(self._orders())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: all layers are loaded before the forward."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Do nothing: blocks are copied when all layers have them."""

    def wait_for_save(self) -> None:
        """Copy what is to be written; the rest goes on in the background."""
        if self._worker is not None:
            self._worker.save(self._orders())

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return the blocks of this step that could not be loaded."""
        return self._worker.take_failed() if self._worker is not None else set()

    def get_kv_connector_stats(self) -> PoolStats | None:
        """Return what this rank's store has counted since the last step."""
        if self._worker is None:
            return None
        stats = PoolStats(data=self._worker.take_counts())
        return None if stats.is_empty() else stats

    @classmethod
    def build_kv_connector_stats(
        cls, data: dict[str, Any] | None = None
    ) -> PoolStats | None:
        """Return stats as they were before they went to another process."""
        return PoolStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> PoolMetrics:
        """Return what shows the stats on `/metrics`."""
        return PoolMetrics(
            vllm_config, metric_types, labelnames, per_engine_labelvalues
        )

    def shutdown(self) -> None:
        """Write what waits."""
        if self._worker is not None:
            self._worker.close()
            self._worker = None

    def _orders(self) -> Orders:
        orders = self._get_connector_metadata()
        assert isinstance(orders, Orders)
        return orders

    # The scheduler's side.

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], Any]
    ) -> None:
        """Learn where the ranks have their blocks."""
        self._planner.set_ranks(metadata)

    def bind_kv_cache_manager(self, kv_cache_manager: KVCacheManager) -> None:
        """Learn which blocks requests have."""
        super().bind_kv_cache_manager(kv_cache_manager)
        self._planner.manager = kv_cache_manager

    def bind_pins(self, pins: PrefixPool) -> None:
        """Learn which blocks must stay on disk, now and later."""
        self._planner.pins = pins

    @property
    def names_directory(self) -> Path | None:
        """Where the names of prefixes are kept; None: no worker keeps anything."""
        return self._planner.names_directory

    def num_on_disk(self, salt: str | None, token_ids: list[int], start: int) -> int:
        """Count the tokens that a prompt would find on disk from a place on."""
        return self._planner.num_on_disk(salt, token_ids, start)

    def on_new_request(self, request: Request) -> None:
        """Take note of a request."""
        self._planner.add(request)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Count the tokens on disk beyond those in memory; a step waits for them."""
        return self._planner.find(request, num_computed_tokens), False

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """Order what was counted to be loaded."""
        self._planner.order_load(request, num_external_tokens)

    def build_connector_meta(
        self, scheduler_output: SchedulerOutput
    ) -> KVConnectorMetadata:
        """Return the orders of a step."""
        return self._planner.orders(scheduler_output.num_scheduled_tokens)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Learn what could not be loaded."""
        if connector_output.invalid_block_ids:
            self._planner.give_up(connector_output.invalid_block_ids)

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Forget a request; its blocks have been copied."""
        self._planner.remove(request)
        return False, None

    def reset_cache(self) -> bool:
        """Remove every block of this configuration from disk."""
        self._planner.clear()
        return True

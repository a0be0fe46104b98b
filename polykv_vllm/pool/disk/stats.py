# SPDX-License-Identifier: Apache-2.0
"""What the stores of the workers count, on its way to `/metrics`."""

from collections.abc import Mapping
from typing import Any

from prometheus_client import Counter, Gauge
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

COUNTERS: Mapping[str, str] = {
    "stored": "Blocks written to disk.",
    "restored": "Blocks read from disk, checked, and put into the cache.",
    "evicted": "Blocks removed from disk to make room for others.",
    "damaged": "Files that were not what their name says, and were not used.",
    "missing": "Blocks that had gone from disk between look-up and reading.",
    "failed": "Blocks that could not be written (disk full, no permission).",
    "dropped": "Blocks not written because the writer was behind or at rest.",
    "no_room": "Blocks not written because all others are pinned.",
    "restore_us": "Microseconds that steps have waited for blocks from disk.",
}
"""What a store counts; each worker counts its own part of a block."""

GAUGES: Mapping[str, str] = {
    "disk_blocks": "Blocks on disk.",
    "disk_bytes": "What one worker's part of them takes on disk.",
}


class PoolStats(KVConnectorStats):
    """Counts since the last time; the gauges of the first worker, which are all alike.

    vLLM adds up the workers of a step and the steps of an interval in one and the same
    way, so a gauge cannot be a sum over workers.
    """

    def reset(self) -> None:
        """Count from zero."""
        self.data: dict[str, Any] = {}

    def aggregate(self, other: KVConnectorStats) -> "PoolStats":
        """Add another worker's, or a later interval's."""
        gauges = {name: other.data[name] for name in GAUGES if name in other.data}
        for name in COUNTERS:
            self.data[name] = self.data.get(name, 0) + other.data.get(name, 0)
        self.data |= gauges
        return self

    def reduce(self) -> dict[str, int | float]:
        """Return what a log line should say: what is not zero."""
        return {name: value for name, value in self.data.items() if value}

    def is_empty(self) -> bool:
        """Whether nothing was counted."""
        return not any(self.data.get(name) for name in COUNTERS)


class PoolMetrics(KVConnectorPromMetrics):
    """The same as Prometheus metrics, `vllm:polykv_pool_*`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._metrics: dict[str, dict[int, Any]] = {}
        kinds = ((COUNTERS, self._counter_cls), (GAUGES, self._gauge_cls))
        for documented, kind in kinds:
            for name, text in documented.items():
                self._metrics[name] = self._per_engine(kind, name, text)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add an interval's counts."""
        for name, value in transfer_stats_data.items():
            metric = self._metrics[name][engine_idx]
            if name in GAUGES:
                metric.set(value)
            elif value:
                metric.inc(value)

    def _per_engine(
        self, kind: type[Counter] | type[Gauge], name: str, text: str
    ) -> dict[int, Any]:
        metric = kind(f"vllm:polykv_pool_{name}", text, labelnames=self._labelnames)
        return {
            index: metric.labels(*values)
            for index, values in self.per_engine_labelvalues.items()
        }

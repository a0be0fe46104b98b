# SPDX-License-Identifier: Apache-2.0
"""The dashboard asks for metrics that exist, under the names that they have."""

import json
import re
from pathlib import Path

DASHBOARD = Path(__file__).parent.parent.parent / "configs" / "grafana"
FROM_VLLM = {
    "vllm:prefix_cache_hits_total",
    "vllm:prefix_cache_queries_total",
    "vllm:external_prefix_cache_hits_total",
    "vllm:kv_cache_usage_perc",
}


def ours() -> set[str]:
    """Return the names that this package registers, as Prometheus shows them."""
    from polykv_vllm.metrics.collector import PolyKVCollector
    from polykv_vllm.pool.disk.stats import COUNTERS, GAUGES

    described = PolyKVCollector(Path("/nowhere"), "m").describe()
    names = {m.name + ("_total" if m.type == "counter" else "") for m in described}
    names |= {f"vllm:polykv_pool_{name}_total" for name in COUNTERS}
    return names | {f"vllm:polykv_pool_{name}" for name in GAUGES}


def test_every_metric_exists() -> None:
    board = json.loads((DASHBOARD / "prefixes.json").read_text())
    expressions = [t["expr"] for panel in board["panels"] for t in panel["targets"]]
    asked = {name for text in expressions for name in re.findall(r"vllm:\w+", text)}
    assert len(asked) > 10
    assert asked <= ours() | FROM_VLLM

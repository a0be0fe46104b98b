# SPDX-License-Identifier: Apache-2.0
"""A run folder with made-up scores, for tests of what comes after measuring."""

from pathlib import Path
from typing import Any

import numpy as np

from polykv_vllm.evaluate.perplexity import PerplexitySuite, figures
from polykv_vllm.evaluate.results import RunStore

SETTINGS = {
    "text": "text.txt",
    "chunk_tokens": 64,
    "score_from": 32,
    "chunks_asked": None,
}
COMMON = {"model": "tiny", "engine": "vllm", "engine_version": "vllm 0.32.0"}
BYTES = {"bf16": 23040, "fp32": 46080, "polykv": 8280, "polykv_k7v4": 8280}
SUITE = PerplexitySuite.name


def fill(path: Path, chunks: int = 4, asked: int | None = None) -> RunStore:
    """Make a folder in which `polykv` costs 0.03 nats a token and fp32 nothing."""
    store = RunStore(path)
    suite = {**SETTINGS, "chunks_asked": asked}
    store.open({**COMMON, "suites": {SUITE: suite}})
    keys = [f"c{index}" for index in range(chunks)]
    cost = {"bf16": 0.0, "fp32": 0.0, "polykv": 0.03, "polykv_k7v4": 0.01}
    for arm, size in BYTES.items():
        items = store.items(arm, SUITE)
        for index, key in enumerate(keys):
            items.add(key, item(index, cost[arm], is_reference=arm == "bf16"))
        reference = None if arm == "bf16" else store.items("bf16", SUITE)
        store.save(
            arm,
            SUITE,
            {
                "arm": arm,
                "suite": SUITE,
                "model": "tiny",
                "settings": suite,
                "bytes_per_token": size,
                "environment": ENVIRONMENT,
                "engine": {"key_treatment": "none" if "polykv" in arm else None},
                "figures": figures(keys, items, reference),
            },
        )
    return store


def item(index: int, cost: float, is_reference: bool = False) -> dict[str, Any]:
    """Return one chunk's scores: `cost` is added to the likelihood and divergence."""
    noise = np.random.default_rng(index).uniform(0, 1, 32)
    return {
        "nll": list(2.5 + 0.2 * index + noise + cost),
        "kld": None if is_reference else list(0.0005 + noise * cost),
        "agrees": None if is_reference else [1] * 31 + [int(cost < 0.02)],
        "seconds": 1.0,
    }


ENVIRONMENT = {
    "cpu": "a CPU",
    "cpu_flags": ["avx2"],
    "threads": 1,
    "load_1min": 0.0,
    "versions": {"vllm": "0.32.0"},
    "commit": "abc",
}

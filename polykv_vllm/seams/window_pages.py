# SPDX-License-Identifier: Apache-2.0
"""Makes the raw pages of a worker when its cache is made."""

import sys
from collections.abc import Callable
from typing import Any

from polykv_vllm.seams.seam import Seam, Wrap

_TARGET = "vllm.v1.worker.gpu_model_runner:GPUModelRunner.initialize_kv_cache"
_IMPLEMENTATION = "polykv_vllm.attention.impl"


def _make_pages_too(original: Callable[..., None]) -> Callable[..., None]:
    def initialize_kv_cache(
        self: Any, kv_cache_config: Any, *args: Any, **kwargs: Any
    ) -> None:
        original(self, kv_cache_config, *args, **kwargs)
        if _IMPLEMENTATION in sys.modules:  # else no layer has a cache of ours
            from polykv_vllm.attention.window_memory import make_pages
            from polykv_vllm.windows.sizes import PLAN_ATTRIBUTE

            make_pages(self, getattr(kv_cache_config, PLAN_ATTRIBUTE, None))

    return initialize_kv_cache


SEAM = Seam(
    name="window_pages",
    target=_TARGET,
    why="a metadata builder does not learn how large the cache is",
    upstream="none",
    expected=(
        "(self, kv_cache_config, is_profiling=False, kv_cache_allocation_context=None)",
    ),
    remove_when="vLLM tells metadata builders the configuration of the cache",
    is_obsolete=lambda: False,
    change=Wrap("window_pages", _TARGET, _make_pages_too, compare="signature"),
)

# SPDX-License-Identifier: Apache-2.0
"""Takes the memory of raw pages from what vLLM divides into blocks.

It runs in the engine core, where the memory of all workers is known and the scheduler
is not yet made.
"""

from collections.abc import Callable
from typing import Any

from polykv_vllm.formats import is_polykv_dtype
from polykv_vllm.seams.seam import Seam, Wrap

# Where it is called: the engine core has imported it by value.
_TARGET = "vllm.v1.engine.core:get_kv_cache_configs"


def _reserve_first(original: Callable[..., Any]) -> Callable[..., Any]:
    def get_kv_cache_configs(
        vllm_config: Any, kv_cache_specs: Any, available_memory: Any
    ) -> Any:
        if not is_polykv_dtype(vllm_config.cache_config.cache_dtype):
            return original(vllm_config, kv_cache_specs, available_memory)
        from polykv_vllm.attention.window_memory import reserve_pages
        from polykv_vllm.windows.sizes import PLAN_ATTRIBUTE

        plan, memory = reserve_pages(vllm_config, kv_cache_specs, available_memory)
        configs = original(vllm_config, kv_cache_specs, memory)
        for config in configs:
            setattr(config, PLAN_ATTRIBUTE, plan)
        return configs

    return get_kv_cache_configs


SEAM = Seam(
    name="window_memory",
    target=_TARGET,
    why="a backend cannot have memory of its own beside the blocks of the cache",
    upstream="none",
    expected=("(vllm_config, kv_cache_specs, available_memory)",),
    remove_when="vLLM lets a backend reserve a part of the cache memory",
    is_obsolete=lambda: False,
    change=Wrap("window_memory", _TARGET, _reserve_first, compare="signature"),
)

# SPDX-License-Identifier: Apache-2.0
"""Prepares an engine configuration that asks for one of our dtypes.

It is checked, given our scheduler, and its metrics are opened.

It runs in the front end, before any process is started or weight is loaded, so that
a refusal is the last line the user sees. A configuration without our dtypes passes
through untouched.
"""

from collections.abc import Callable
from typing import Any

from polykv_vllm.formats import is_polykv_dtype
from polykv_vllm.seams.seam import Seam, Wrap

_TARGET = "vllm.engine.arg_utils:EngineArgs.create_engine_config"


def asks_for_us(engine_args: Any) -> bool:
    """Whether the engine, or its draft model, is to use one of our dtypes."""
    draft = getattr(engine_args, "speculative_config", None) or {}
    wanted = [getattr(engine_args, "kv_cache_dtype", None)]
    if isinstance(draft, dict):
        wanted.append(draft.get("kv_cache_dtype"))
    return any(is_polykv_dtype(dtype) for dtype in wanted)


def _check(original: Callable[..., Any]) -> Callable[..., Any]:
    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not asks_for_us(self):
            return original(self, *args, **kwargs)
        from polykv_vllm.seams.registry import require

        require()
        from polykv_vllm.pool.selection import (
            check_layers,
            check_prefixes,
            choose_connector,
            select_scheduler,
        )

        choose_connector(self)
        check_prefixes(self.additional_config)
        vllm_config = original(self, *args, **kwargs)
        from polykv_vllm.attention.validate import prepare_vllm_config
        from polykv_vllm.config import parse_options
        from polykv_vllm.metrics import serving

        prepare_vllm_config(vllm_config)
        check_layers(vllm_config)
        select_scheduler(vllm_config, parse_options(vllm_config.additional_config))
        # Before the engine's processes start: they inherit where to write.
        serving.start(vllm_config)
        return vllm_config

    return create_engine_config


SEAM = Seam(
    name="engine_config",
    target=_TARGET,
    why="vLLM has no hook to refuse a configuration before the weights load",
    upstream="none",
    expected=("(self, usage_context=None, headless=False)",),
    remove_when="vLLM asks the attention backend before it starts the engine",
    is_obsolete=lambda: False,
    change=Wrap("engine_config", _TARGET, _check, compare="signature"),
)

# SPDX-License-Identifier: Apache-2.0
"""Sends layers with one of our dtypes to our attention backend.

The CPU platform always answers with its own backend and ignores a requested one.
Layers with another dtype (all of them, or those that
`--kv-cache-dtype-skip-layers` names) keep the answer that vLLM gives.
"""

import inspect
from collections.abc import Callable
from typing import Any

from polykv_vllm.formats import is_polykv_dtype
from polykv_vllm.seams import probe
from polykv_vllm.seams.seam import Seam, Wrap

_TARGET = "vllm.platforms.cpu:CpuPlatform.get_attn_backend_cls"


def _route(original: Callable[..., str]) -> Callable[..., str]:
    def get_attn_backend_cls(
        cls: type,
        selected_backend: Any,
        attn_selector_config: Any,
        num_heads: int | None = None,
    ) -> str:
        if not is_polykv_dtype(attn_selector_config.kv_cache_dtype):
            return original(cls, selected_backend, attn_selector_config, num_heads)
        from polykv_vllm.attention.backend import select_backend

        return select_backend(selected_backend, attn_selector_config)

    return get_attn_backend_cls


def _is_obsolete() -> bool:
    function = probe.function_of(probe.resolve(_TARGET)[2])
    source = inspect.getsource(inspect.unwrap(function))
    return "validate_configuration" in source


SEAM = Seam(
    name="attention_backend",
    target=_TARGET,
    why="the CPU platform ignores a requested backend and the layer's dtype",
    upstream="vllm#51751 (RFC)",
    expected=("ee442b9b20f2d781",),
    remove_when="the CPU platform asks backends what they support, as CUDA's does",
    is_obsolete=_is_obsolete,
    change=Wrap("attention_backend", _TARGET, _route),
)

# SPDX-License-Identifier: Apache-2.0
"""Sends layers with one of our dtypes to our attention backend.

vLLM has a closed list of backends, and on the CPU only one of them. Layers with another
dtype (all of them, or those that `--kv-cache-dtype-skip-layers` names) keep the answer
that vLLM gives on its platform.
"""

from collections.abc import Callable
from typing import Any

from polykv_vllm.formats import is_polykv_dtype
from polykv_vllm.seams.seam import Seam, Wrap

_TARGET = "vllm.v1.attention.selector:_cached_get_attn_backend"


def _route(original: Callable[..., type]) -> Callable[..., type]:
    def get_attn_backend(
        backend: Any,
        attn_selector_config: Any,
        num_heads: int | None = None,
        **cache_key: Any,
    ) -> type:
        if not is_polykv_dtype(attn_selector_config.kv_cache_dtype):
            return original(backend, attn_selector_config, num_heads, **cache_key)
        from polykv_vllm.attention.backend import select_backend

        return select_backend(backend, attn_selector_config)

    return get_attn_backend


SEAM = Seam(
    name="attention_backend",
    target=_TARGET,
    why="vLLM has a closed list of backends; on the CPU it takes its own, always",
    upstream="vllm#51751 (RFC)",
    expected=("91ded413bc91efa9",),
    remove_when="vLLM lets plugins register backends for KV cache dtypes",
    is_obsolete=lambda: False,
    change=Wrap("attention_backend", _TARGET, _route),
)

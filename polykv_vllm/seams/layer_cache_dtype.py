# SPDX-License-Identifier: Apache-2.0
"""Gives a layer the cache dtype that its model forgets to hand over.

A layer that is made without a `cache_config` keeps its keys and values in the model's
dtype, whatever `--kv-cache-dtype` says, and nothing tells: of vLLM's models, Falcon
makes its layers so.
"""

import inspect
from collections.abc import Callable
from typing import Any

from polykv_vllm.formats import is_polykv_dtype
from polykv_vllm.seams.seam import Seam, Wrap

_TARGET = "vllm.model_executor.layers.attention.attention:Attention.__init__"


def _complete(original: Callable[..., None]) -> Callable[..., None]:
    signature = inspect.signature(original)

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        from vllm.config import get_current_vllm_config

        bound = signature.bind(self, *args, **kwargs)
        bound.apply_defaults()
        cache_config = get_current_vllm_config().cache_config
        if (
            bound.arguments["cache_config"] is None
            and bound.arguments["attn_type"] == "decoder"
            and is_polykv_dtype(cache_config.cache_dtype)
        ):
            bound.arguments["cache_config"] = cache_config
        original(*bound.args, **bound.kwargs)

    return __init__


SEAM = Seam(
    name="layer_cache_dtype",
    target=_TARGET,
    why="a layer made without a cache_config (Falcon's) ignores --kv-cache-dtype",
    upstream="none",
    expected=("37c29e7d4de5e259",),
    remove_when="every model of vLLM hands its cache_config to its attention layers",
    is_obsolete=lambda: False,
    change=Wrap("layer_cache_dtype", _TARGET, _complete),
)

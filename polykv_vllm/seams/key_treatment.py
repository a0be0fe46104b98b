# SPDX-License-Identifier: Apache-2.0
"""Gives the layers their transforms of keys and values when a model is loaded.

Values: a calibration is folded into the weights before vLLM packs them. Keys: their
transforms are made when the weights are final.

An attention layer sees neither the projection that makes its keys nor the module
around it. Every loader that reads weights file by file ends with this function; those
that do not (tensorizer, the weight cache) leave their layers without scales, which is
told or, if scales were asked for, refused when the cache is set up
(`attention/metadata.py`).
"""

import sys
from collections.abc import Callable
from typing import Any

from polykv_vllm.seams.seam import Seam, Wrap

# Where it is called: the loader has imported it by value.
_TARGET = "vllm.model_executor.model_loader.base_loader:process_weights_after_loading"
_IMPLEMENTATION = "polykv_vllm.attention.impl"


def _assign(original: Callable[..., None]) -> Callable[..., None]:
    def process_weights_after_loading(
        model: Any, model_config: Any, target_device: Any
    ) -> None:
        if _IMPLEMENTATION not in sys.modules:  # no layer has a cache of ours
            return original(model, model_config, target_device)
        from polykv_vllm.attention.calibration import apply_calibration
        from polykv_vllm.attention.key_treatment import assign_key_transforms

        apply_calibration(model, model_config)
        original(model, model_config, target_device)
        assign_key_transforms(model, model_config.dtype)

    return process_weights_after_loading


SEAM = Seam(
    name="key_treatment",
    target=_TARGET,
    why="an attention layer cannot see the weights that make its keys",
    upstream="none",
    expected=("(model, model_config, target_device)",),
    remove_when="vLLM hands attention implementations the model when it is loaded",
    is_obsolete=lambda: False,
    change=Wrap("key_treatment", _TARGET, _assign, compare="signature"),
)

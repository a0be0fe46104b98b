# SPDX-License-Identifier: Apache-2.0
"""What keys need before they are quantized: a treatment for each layer.

`transform.py` is the algebra, `projection.py` what the weights say about the keys of a
layer, `scales.py` and `treat.py` make the transform of it, `identity.py` says what
cached bytes mean. Torch only: loaded models of vLLM and transformers are read elsewhere
and described by `KeyProjection`.
"""

from polykv_vllm.keys.identity import format_identity
from polykv_vllm.keys.projection import KeyProjection, RotaryPairs, after_head_norm
from polykv_vllm.keys.scales import channel_scales
from polykv_vllm.keys.transform import TREATMENTS, KeyTransform
from polykv_vllm.keys.treat import AUTO, SCALING, key_transform

__all__ = [
    "AUTO",
    "SCALING",
    "TREATMENTS",
    "KeyProjection",
    "KeyTransform",
    "RotaryPairs",
    "after_head_norm",
    "channel_scales",
    "format_identity",
    "key_transform",
]

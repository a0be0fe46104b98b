# SPDX-License-Identifier: Apache-2.0
"""What keys need before they are quantized: a treatment for each layer.

`transform.py` is the algebra, `projection.py` what the weights say about the keys of a
layer, `scales.py` and `choose.py` the choice, `identity.py` what cached bytes mean,
`checkpoint.py` reads a model's files. Torch only: loaded models of vLLM and
transformers are read elsewhere and described by `KeyProjection`.
"""

from polykv_vllm.keys.choose import choose_treatment
from polykv_vllm.keys.identity import format_identity
from polykv_vllm.keys.projection import KeyProjection, RotaryPairs, after_head_norm
from polykv_vllm.keys.scales import channel_scales
from polykv_vllm.keys.transform import TREATMENTS, KeyTransform
from polykv_vllm.keys.treat import SCALING, key_transform

__all__ = [
    "SCALING",
    "TREATMENTS",
    "KeyProjection",
    "KeyTransform",
    "RotaryPairs",
    "after_head_norm",
    "channel_scales",
    "choose_treatment",
    "format_identity",
    "key_transform",
]

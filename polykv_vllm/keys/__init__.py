# SPDX-License-Identifier: Apache-2.0
"""What keys need before they are quantized: a treatment for each layer.

`transform.py` is the algebra, `projection.py` what the weights say about the keys of a
layer, `choose.py` the choice. Torch only: vLLM and transformers models alike are read
elsewhere and described by `KeyProjection`.
"""

from polykv_vllm.keys.projection import KeyProjection, RotaryPairs
from polykv_vllm.keys.transform import TREATMENTS, KeyTransform

__all__ = ["TREATMENTS", "KeyProjection", "KeyTransform", "RotaryPairs"]

# SPDX-License-Identifier: Apache-2.0
"""Calibration: from a text to a transform of keys and values for every KV head.

`transforms.py` is the algebra, `statistics.py` what is summed over a text and
`collect.py` the forward pass that sums it; `artifact.py` keeps the transforms with what
they were made for, `fold.py` multiplies those of the values into the weights. Torch and
transformers; vLLM reads an artifact through `attention/calibration.py`.
"""

# SPDX-License-Identifier: Apache-2.0
"""An engine whose attention costs nothing: the bound for any attention.

Everything else stays: linear layers, storing keys and values, scheduling. The tokens
that it generates mean nothing.
"""

from typing import Any

import torch

from polykv_vllm.attention.impl import PolyKVImpl


def _no_attention(
    self: PolyKVImpl, *inputs: Any, output: torch.Tensor, **scales: Any
) -> torch.Tensor:
    # Zeros: what happens to be there may be NaN, which some kernels compute slowly.
    return output.zero_()


PolyKVImpl.forward = _no_attention  # type: ignore[assignment,method-assign]


class WithoutAttention:
    """Mixed into vLLM's worker; importing this module is what it is for."""

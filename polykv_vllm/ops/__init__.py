# SPDX-License-Identifier: Apache-2.0
"""The operations on the compressed cache, whatever carries them out.

    reshape_and_cache  quantize, pack and scatter new keys and values
    paged_attention    causal attention straight from the packed blocks

Both look up (op, device, isa) in one table; a missing entry raises and names what
exists. Nothing here imports vllm.
"""

from polykv_vllm.ops.dispatch import (
    available_isas,
    current_isa,
    paged_attention,
    reshape_and_cache,
)

__all__ = ["available_isas", "current_isa", "paged_attention", "reshape_and_cache"]

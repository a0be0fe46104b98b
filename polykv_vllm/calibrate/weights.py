# SPDX-License-Identifier: Apache-2.0
"""Which weights a calibration was made from: a digest for each KV head.

By head, so that a rank of a tensor-parallel engine checks the ones it has.
"""

import hashlib

import torch

_SMALLEST = 2.0**-14
"""Of fp16's normal numbers. What is smaller is taken as zero, so that a bf16 checkpoint
has one digest whether it is loaded in bf16, fp16 or fp32."""
_DIGEST_CHARACTERS = 32


def head_digests(
    key: tuple[torch.Tensor, torch.Tensor | None],
    value: tuple[torch.Tensor, torch.Tensor | None],
    head_dim: int,
) -> list[str]:
    """Return a digest of each KV head's key and value projection.

    Args:
        key: Weight `[num_kv_heads * head_dim, hidden_size]` and bias
            `[num_kv_heads * head_dim]` or None.
        value: Likewise.
        head_dim: Elements of a head.

    """
    parts = [_heads(tensor, head_dim) for tensor in (*key, *value)]
    digests = []
    for head in range(key[0].shape[0] // head_dim):
        digest = hashlib.sha256()
        for part in parts:
            if part is not None:
                digest.update(part[head].view(torch.int16).numpy().tobytes())
        digests.append(digest.hexdigest()[:_DIGEST_CHARACTERS])
    return digests


def _heads(tensor: torch.Tensor | None, head_dim: int) -> torch.Tensor | None:
    """Return `[num_kv_heads, ...]` bf16; None for no bias, or one of zeros."""
    if tensor is None or (tensor.dim() == 1 and not bool(tensor.any())):
        return None
    rounded = tensor.detach().cpu().bfloat16()
    rounded = torch.where(rounded.abs() < _SMALLEST, torch.zeros_like(rounded), rounded)
    return rounded.view(-1, head_dim * (tensor.numel() // tensor.shape[0]))

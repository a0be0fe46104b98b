# SPDX-License-Identifier: Apache-2.0
"""What the cached bytes of a layer mean, in one line of text."""

import hashlib

import torch

from polykv_vllm.formats import FormatSpec
from polykv_vllm.formats.layout import LAYOUT_ID
from polykv_vllm.keys.transform import KeyTransform

_DIGEST_CHARACTERS = 32  # 128 bits: no two transforms meet by chance


def format_identity(
    fmt: FormatSpec,
    head_dim: int,
    block_size: int,
    key_transform: KeyTransform,
    calibration: str | None = None,
    layout_id: str = LAYOUT_ID,
) -> str:
    """Return the identity of a layer's cached bytes.

    Bytes may be read as keys and values only by a layer with the same identity: it
    changes with the format, its version, the layout, the shape of a tile, the key
    treatment, any bit of its scales, matrices or centers, and the calibration whose
    transforms the values (and keys) went through.

    Args:
        fmt: The format.
        head_dim: Elements per head.
        block_size: Tokens per block.
        key_transform: The layer's.
        calibration: Digest of the calibration; None without.
        layout_id: Order of the bytes in a tile; that of GPUs is another
            (`ops.layout_id`).

    """
    treatment = key_transform.treatment
    for numbers in (key_transform.scales, key_transform.matrices):
        if numbers is not None:
            treatment += f":{_digest(numbers)}"
    if key_transform.centers is not None:
        treatment += f":centers:{_digest(key_transform.centers)}"
    parts = [
        f"{fmt.name}-{fmt.version}",
        layout_id,
        f"head_dim={head_dim}",
        f"block_size={block_size}",
        f"keys={treatment}",
    ]
    if calibration is not None:
        parts.append(f"calibration={calibration[:_DIGEST_CHARACTERS]}")
    return " ".join(parts)


def _digest(numbers: torch.Tensor) -> str:
    values = numbers.detach().float().cpu().contiguous()
    digest = hashlib.sha256(str(tuple(values.shape)).encode())
    digest.update(values.numpy().astype("<f4").tobytes())
    return digest.hexdigest()[:_DIGEST_CHARACTERS]

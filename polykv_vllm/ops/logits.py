# SPDX-License-Identifier: Apache-2.0
"""What a layer does to its logits besides scaling them and taking a softmax."""

import math
from dataclasses import dataclass

import torch

from polykv_vllm.keys import KeyTransform


@dataclass(frozen=True, eq=False)
class LogitTerms:
    """Terms of one layer's softmax, as vLLM's CPU backend means them.

    A logit `s = q . k * scale` becomes `cap * tanh(s / cap)`, then gets
    `slope * (key position - query position)`; the softmax divides by the sum of the
    weights and `exp(sink)`.

    Attributes:
        soft_cap: In natural units; 0 for none.
        alibi_slopes: `[num_heads]` fp32 on the CPU, or None.
        sinks: `[num_heads]` fp32 on the CPU, or None. Read at every call, so that the
            owner may change the values in place.

    Raises:
        ValueError: A number or a tensor is not what is said here.

    """

    soft_cap: float = 0.0
    alibi_slopes: torch.Tensor | None = None
    sinks: torch.Tensor | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.soft_cap < math.inf:
            raise ValueError(
                "the logits soft cap must be positive and finite, or 0 for none, not "
                f"{self.soft_cap}"
            )
        for name in ("alibi_slopes", "sinks"):
            tensor = getattr(self, name)
            if tensor is None:
                continue
            if tensor.dtype != torch.float32 or tensor.device.type != "cpu":
                raise ValueError(
                    f"{name} must be fp32 on the CPU, not {tensor.dtype} on "
                    f"{tensor.device}"
                )
            if tensor.dim() != 1 or not tensor.is_contiguous():
                raise ValueError(
                    f"{name} must be contiguous [num_heads], not {list(tensor.shape)} "
                    f"with strides {tensor.stride()}"
                )
        slopes = self.alibi_slopes
        if slopes is not None and not bool(slopes.isfinite().all()):
            raise ValueError("alibi_slopes must be finite")

    def check_heads(self, num_heads: int) -> None:
        """Raise ValueError unless the terms are those of so many query heads."""
        for name in ("alibi_slopes", "sinks"):
            tensor = getattr(self, name)
            if tensor is not None and tensor.shape[0] != num_heads:
                raise ValueError(
                    f"{tensor.shape[0]} {name} for {num_heads} query heads"
                )

    def check_transform(self, transform: KeyTransform) -> None:
        """Raise ValueError for centred keys where the logits themselves count."""
        if transform.centers is None:
            return
        terms = {"a soft cap": self.soft_cap, "sinks": self.sinks is not None}
        if found := [name for name, is_used in terms.items() if is_used]:
            raise ValueError(
                f"centred keys change the logits, which {' and '.join(found)} of the "
                "layer depend on; possible: a key transform without centers "
                "(polykv calibrate --no-center-keys)"
            )

# SPDX-License-Identifier: Apache-2.0
"""The transform T of a layer's keys, and its inverse transpose for the queries.

After RoPE a key becomes `T k` before it is quantized, a query `T^-T q` before it meets
the cache, so that every product `q . k` stays what it was:

    channel_scale             T = diag(1/s)      keys are divided, queries multiplied
    hadamard                  T = R              R orthonormal: the same for both
    channel_scale_hadamard    T = R diag(1/s)

`s` is per KV head and channel; the query heads of a group share their KV head's.
"""

from dataclasses import dataclass

import torch

from polykv_vllm.reference.rotation import rotate

TREATMENTS: tuple[str, ...] = (
    "none",
    "channel_scale",
    "hadamard",
    "channel_scale_hadamard",
)
"""Names of the treatments, as options and format identities spell them; the number of a
name is 1 for scales, 2 for the Hadamard transform, 3 for both."""


@dataclass(frozen=True, eq=False)
class KeyTransform:
    """How one layer's keys and queries are transformed after RoPE.

    Attributes:
        scales: `[num_kv_heads, head_dim]` fp32, positive and finite: keys are divided
            by them. None for all ones.
        rotate: Whether the orthonormal Hadamard transform follows.

    """

    scales: torch.Tensor | None = None
    rotate: bool = False

    def __post_init__(self) -> None:
        scales = self.scales
        if scales is None:
            return
        if scales.dim() != 2 or scales.dtype != torch.float32:
            raise ValueError(
                "scales must be [num_kv_heads, head_dim] in fp32, not "
                f"{list(scales.shape)} in {scales.dtype}"
            )
        if not bool((scales.isfinite() & (1 / scales).isfinite() & (scales > 0)).all()):
            raise ValueError("scales and their reciprocals must be positive and finite")

    @property
    def treatment(self) -> str:
        """The name, one of `TREATMENTS`."""
        return TREATMENTS[(self.scales is not None) + 2 * self.rotate]

    def check_shape(self, num_kv_heads: int, head_dim: int) -> None:
        """Raise ValueError unless the scales are those of such a cache."""
        needed = [num_kv_heads, head_dim]
        if self.scales is not None and list(self.scales.shape) != needed:
            raise ValueError(
                f"the key transform has scales {list(self.scales.shape)}; the cache "
                f"needs [num_kv_heads, head_dim] = {needed}"
            )

    @property
    def key_multipliers(self) -> torch.Tensor | None:
        """What keys are multiplied with, like `scales`; None for all ones."""
        return None if self.scales is None else 1 / self.scales

    def keys(self, key: torch.Tensor) -> torch.Tensor:
        """Return `T k`, fp32, for keys `[num_tokens, num_kv_heads, head_dim]`."""
        key = key.float()
        if (multipliers := self.key_multipliers) is not None:
            # A product with the reciprocal, as the kernels have it: the same bits.
            key = key * multipliers
        return rotate(key) if self.rotate else key

    def queries(self, query: torch.Tensor) -> torch.Tensor:
        """Return `T^-T q`, fp32, for queries `[num_tokens, num_heads, head_dim]`."""
        query = query.float()
        if self.scales is not None:
            group = query.shape[1] // self.scales.shape[0]
            query = query * self.scales.repeat_interleave(group, 0)
        return rotate(query) if self.rotate else query

    def restore_keys(self, key: torch.Tensor) -> torch.Tensor:
        """Return `T^-1 k`, fp32: transformed keys in the model's own basis."""
        key = rotate(key.float()) if self.rotate else key.float()
        return key if self.scales is None else key * self.scales

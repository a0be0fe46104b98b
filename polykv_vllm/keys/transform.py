# SPDX-License-Identifier: Apache-2.0
"""The transform T of a layer's keys, and its inverse transpose for the queries.

After RoPE a key becomes `T k` before it is quantized, a query `T^-T q` before it meets
the cache, so that every product `q . k` stays what it was:

    channel_scale             T = diag(1/s)      keys are divided, queries multiplied
    hadamard                  T = R              R orthonormal: the same for both
    channel_scale_hadamard    T = R diag(1/s)
    matrix                    any T that has an inverse, from a calibration

`s` is per KV head and channel, a matrix per KV head; the query heads of a group share
their KV head's.

Keys may be centred first: `T (k - c)`. A query's products with all keys then lose
`q . c`, which a softmax does not see, so queries stay as they are. What depends on the
logits themselves, a soft cap or attention sinks, cannot be had with it.
"""

from dataclasses import dataclass
from functools import cached_property

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

_LARGEST_ERROR = 1e-6
"""Of T T^-1 - I, in fp64: beyond it T has no usable inverse."""


@dataclass(frozen=True, eq=False)
class KeyTransform:
    """How one layer's keys and queries are transformed after RoPE.

    Attributes:
        scales: `[num_kv_heads, head_dim]` fp32, positive and finite: keys are divided
            by them. None for all ones.
        rotate: Whether the orthonormal Hadamard transform follows.
        matrices: `[num_kv_heads, head_dim, head_dim]` fp32 or fp64: T itself, instead
            of scales and Hadamard transform. None for none.
        centers: `[num_kv_heads, head_dim]` fp32, finite: subtracted from every key
            before all else. None for zeros.

    """

    scales: torch.Tensor | None = None
    rotate: bool = False
    matrices: torch.Tensor | None = None
    centers: torch.Tensor | None = None

    def __post_init__(self) -> None:
        if self.matrices is not None:
            self._check_matrices(self.matrices)
        for name in ("scales", "centers"):
            rows = getattr(self, name)
            if rows is None:
                continue
            if rows.dim() != 2 or rows.dtype != torch.float32:
                raise ValueError(
                    f"{name} must be [num_kv_heads, head_dim] in fp32, not "
                    f"{list(rows.shape)} in {rows.dtype}"
                )
        scales, centers = self.scales, self.centers
        if centers is not None and not bool(centers.isfinite().all()):
            raise ValueError("centers must be finite")
        if scales is not None and not bool(
            (scales.isfinite() & (1 / scales).isfinite() & (scales > 0)).all()
        ):
            raise ValueError("scales and their reciprocals must be positive and finite")

    def _check_matrices(self, matrices: torch.Tensor) -> None:
        if self.scales is not None or self.rotate:
            raise ValueError("matrices stand for scales and rotation, not beside them")
        if matrices.dim() != 3 or matrices.shape[1] != matrices.shape[2]:
            raise ValueError(
                "matrices must be [num_kv_heads, head_dim, head_dim], not "
                f"{list(matrices.shape)}"
            )
        for head, matrix in enumerate(matrices.double()):
            eye = torch.eye(len(matrix), dtype=torch.float64)
            inverse, info = torch.linalg.inv_ex(matrix)
            error = (matrix @ inverse - eye).abs().max()
            if info or not error < _LARGEST_ERROR:
                raise ValueError(
                    f"the key transform of KV head {head} has no usable inverse: "
                    f"|T T^-1 - I| = {error.item():.1e}"
                )

    @cached_property
    def key_matrices(self) -> torch.Tensor | None:
        """What key rows are multiplied with from the right: T^T, fp32; None without."""
        return None if self.matrices is None else self.matrices.mT.float().contiguous()

    @cached_property
    def query_matrices(self) -> torch.Tensor | None:
        """What query rows are multiplied with: T^-1, inverted in fp64, fp32."""
        if self.matrices is None:
            return None
        return torch.linalg.inv(self.matrices.double()).float().contiguous()

    @property
    def treatment(self) -> str:
        """The name: one of `TREATMENTS`, or "matrix"."""
        if self.matrices is not None:
            return "matrix"
        return TREATMENTS[(self.scales is not None) + 2 * self.rotate]

    def check_shape(self, num_kv_heads: int, head_dim: int) -> None:
        """Raise ValueError unless the numbers are those of such a cache."""
        needed = [num_kv_heads, head_dim]
        for name in ("scales", "centers"):
            rows = getattr(self, name)
            if rows is not None and list(rows.shape) != needed:
                raise ValueError(
                    f"the key transform has {name} {list(rows.shape)}; the cache "
                    f"needs [num_kv_heads, head_dim] = {needed}"
                )
        matrices = self.matrices
        if matrices is not None and list(matrices.shape) != [*needed, head_dim]:
            raise ValueError(
                f"the key transform has matrices {list(matrices.shape)}; the cache "
                f"needs [num_kv_heads, head_dim, head_dim] = {[*needed, head_dim]}"
            )

    @property
    def key_multipliers(self) -> torch.Tensor | None:
        """What keys are multiplied with, like `scales`; None for all ones."""
        return None if self.scales is None else 1 / self.scales

    def keys(self, key: torch.Tensor) -> torch.Tensor:
        """Return `T (k - c)`, fp32, for keys `[num_tokens, num_kv_heads, head_dim]`."""
        key = key.float()
        if self.centers is not None:
            key = key - self.centers
        if self.key_matrices is not None:
            return _times(key, self.key_matrices)
        if (multipliers := self.key_multipliers) is not None:
            # A product with the reciprocal, as the kernels have it: the same bits.
            key = key * multipliers
        return rotate(key) if self.rotate else key

    def queries(self, query: torch.Tensor) -> torch.Tensor:
        """Return `T^-T q`, fp32, for queries `[num_tokens, num_heads, head_dim]`."""
        if self.query_matrices is not None:
            group = query.shape[1] // self.query_matrices.shape[0]
            return _times(query, self.query_matrices.repeat_interleave(group, 0))
        query = query.float()
        if self.scales is not None:
            group = query.shape[1] // self.scales.shape[0]
            query = query * self.scales.repeat_interleave(group, 0)
        return rotate(query) if self.rotate else query

    def restore_keys(self, key: torch.Tensor) -> torch.Tensor:
        """Return `T^-1 k + c`, fp32: transformed keys as the model made them."""
        if self.matrices is not None:
            key = _times(key, torch.linalg.inv(self.matrices.double()).mT)
        else:
            key = rotate(key.float()) if self.rotate else key.float()
            key = key if self.scales is None else key * self.scales
        return key if self.centers is None else key + self.centers


def _times(rows: torch.Tensor, matrices: torch.Tensor) -> torch.Tensor:
    """Multiply each head's rows with its matrix in fp64, rounded to fp32 once."""
    return torch.einsum("thi,hij->thj", rows.double(), matrices.double()).float()

# SPDX-License-Identifier: Apache-2.0
"""The named formats: what `--kv-cache-dtype` may say, and what it means."""

from dataclasses import dataclass
from typing import Literal

SUPPORTED_HEAD_DIMS: tuple[int, ...] = (
    32,
    64,
    80,
    96,
    112,
    128,
    160,
    192,
    224,
    256,
    512,
)
"""Head dimensions that the kernels are built for: those of vLLM's CPU backend."""

_SCALE_BYTES = 2  # bf16: the range of fp32, so rows of any norm keep a scale


@dataclass(frozen=True)
class FormatSpec:
    """One way to store a (token, KV head) pair.

    Keys: symmetric integers, one bf16 scale per (token, KV head).
    Values: Hadamard-rotated and coded with a Lloyd-Max codebook
    (`value_rotation == "hadamard"`), or symmetric int8 (`"none"`); one bf16 scale
    per (token, KV head).

    Attributes:
        name: Canonical name, `polykv_k<key bits>v<value bits>`.
        key_bits: 7 or 8. With 7, the free bit of each key byte holds the top bit
            of a value code of the same token.
        value_bits: 3, 4 or 8.
        value_rotation: "hadamard" or "none".
        version: Raised when the bytes of the format change their meaning.

    """

    name: str
    key_bits: int
    value_bits: int
    value_rotation: Literal["hadamard", "none"]
    version: int = 1

    @property
    def key_bias(self) -> int:
        """Added to a key code so that the stored integer is unsigned."""
        return 1 << (self.key_bits - 1)

    @property
    def key_max_code(self) -> int:
        """Largest magnitude of a key code: 127 or 63."""
        return self.key_bias - 1

    @property
    def value_plane_bits(self) -> int:
        """Value bits stored in the value section (the rest ride with the keys)."""
        return self.value_bits - (8 - self.key_bits)

    def slot_bytes(self, head_dim: int) -> int:
        """Bytes of one (token, KV head).

        Raises:
            ValueError: `head_dim` is not supported.

        """
        self.check_head_dim(head_dim)
        return head_dim + head_dim * self.value_plane_bits // 8 + 2 * _SCALE_BYTES

    def compression_ratio(self, head_dim: int, itemsize: int = 2) -> float:
        """Uncompressed bytes (`itemsize` per element) over `slot_bytes`."""
        return 2 * head_dim * itemsize / self.slot_bytes(head_dim)

    def check_head_dim(self, head_dim: int) -> None:
        """Raise ValueError unless kernels exist for `head_dim`."""
        if head_dim not in SUPPORTED_HEAD_DIMS:
            raise ValueError(
                f"{self.name} does not support head size {head_dim}; supported "
                f"head sizes: {', '.join(map(str, SUPPORTED_HEAD_DIMS))}"
            )


FORMATS: dict[str, FormatSpec] = {
    spec.name: spec
    for spec in (
        FormatSpec("polykv_k8v3", 8, 3, "hadamard"),
        FormatSpec("polykv_k7v4", 7, 4, "hadamard"),
        FormatSpec("polykv_k8v8", 8, 8, "none"),
        FormatSpec("polykv_k8v4", 8, 4, "hadamard"),
    )
}

ALIASES: dict[str, str] = {"polykv": "polykv_k8v3"}
"""Short names; `polykv` is the published format."""

CACHE_DTYPES: tuple[str, ...] = (*ALIASES, *FORMATS)
"""Every value that this package adds to `--kv-cache-dtype`."""


def power_blocks(head_dim: int) -> tuple[int, ...]:
    """Return the powers of two that `head_dim` is a sum of, the largest first.

    Values are rotated by one Hadamard matrix for each. Fewer and larger blocks beat
    equal ones: of 96 = 64 + 32 the error of one-hot rows is half that of 3 x 32, of
    rows with 2 % outliers 3 % less; Gaussian rows do not care.
    """
    return tuple(
        1 << bit
        for bit in reversed(range(head_dim.bit_length()))
        if head_dim >> bit & 1
    )


def is_polykv_dtype(cache_dtype: str | None) -> bool:
    """Whether `cache_dtype` names one of our formats."""
    return cache_dtype in CACHE_DTYPES


def get_format(name: str) -> FormatSpec:
    """Return the format called `name`, aliases resolved.

    Raises:
        ValueError: There is no such format; the message lists those there are.

    """
    spec = FORMATS.get(ALIASES.get(name, name))
    if spec is None:
        raise ValueError(
            f"unknown KV cache format {name!r}; available: {', '.join(CACHE_DTYPES)}"
        )
    return spec

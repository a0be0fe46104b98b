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

_LOW_BIT_HEAD_DIMS = (64, 128, 256)
"""Those whose planes of key bits are whole chunks, and whose Hadamard matrix is one."""

Quantizer = Literal["symmetric", "codebook", "affine"]
"""How a row becomes codes:

    symmetric    signed integers times a scale (7 and 8 bits)
    codebook     Lloyd-Max levels times a scale (`formats/codebook.py`)
    affine       a minimum plus a code times a scale, after large elements were clipped

Scales and minimums are bf16, one per (token, KV head).
"""

_SCALE_BYTES = 2  # bf16: the range of fp32, so rows of any norm keep a scale


@dataclass(frozen=True)
class FormatSpec:
    """One way to store a (token, KV head) pair.

    Attributes:
        name: Canonical name, `polykv_k<key bits>v<value bits>`.
        key_bits: 2, 3, 4, 7 or 8. With 7, the free bit of each key byte holds the top
            bit of a value code of the same token.
        value_bits: 2, 3, 4 or 8.
        value_rotation: "hadamard": values are rotated before they are quantized and
            the output of attention is rotated back; or "none".
        key_quantizer: "symmetric" from 7 bits on, another below.
        value_quantizer: Any.
        key_clip: Percentile, 0..1, of a key's magnitudes at which "affine" clips it; 0
            for no clip.
        value_clip: The same of values.
        version: Raised when the bytes of the format change their meaning.

    """

    name: str
    key_bits: int
    value_bits: int
    value_rotation: Literal["hadamard", "none"]
    key_quantizer: Quantizer = "symmetric"
    value_quantizer: Quantizer = "codebook"
    key_clip: float = 0.0
    value_clip: float = 0.0
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
    def is_low_bit(self) -> bool:
        """Whether keys have so few bits that they need a calibrated transform."""
        return self.key_bits < 7

    @property
    def head_dims(self) -> tuple[int, ...]:
        """Head dimensions that kernels exist for."""
        return _LOW_BIT_HEAD_DIMS if self.is_low_bit else SUPPORTED_HEAD_DIMS

    @property
    def key_plane_bits(self) -> int:
        """Bits per key element in the key section: a byte from 7 bits on."""
        return self.key_bits if self.is_low_bit else 8

    @property
    def value_plane_bits(self) -> int:
        """Value bits stored in the value section (the rest ride with the keys)."""
        return self.value_bits - (self.key_plane_bits - self.key_bits)

    @property
    def minimum_bytes(self) -> tuple[int, int]:
        """Bytes of a key's and of a value's minimum."""
        quantizers = (self.key_quantizer, self.value_quantizer)
        key, value = (_SCALE_BYTES * (each == "affine") for each in quantizers)
        return key, value

    def slot_bytes(self, head_dim: int) -> int:
        """Bytes of one (token, KV head).

        Raises:
            ValueError: `head_dim` is not supported.

        """
        self.check_head_dim(head_dim)
        codes = head_dim * (self.key_plane_bits + self.value_plane_bits) // 8
        return codes + 2 * _SCALE_BYTES + sum(self.minimum_bytes)

    def compression_ratio(self, head_dim: int, itemsize: int = 2) -> float:
        """Uncompressed bytes (`itemsize` per element) over `slot_bytes`."""
        return 2 * head_dim * itemsize / self.slot_bytes(head_dim)

    def check_head_dim(self, head_dim: int) -> None:
        """Raise ValueError unless kernels exist for `head_dim`."""
        if head_dim not in self.head_dims:
            raise ValueError(
                f"{self.name} does not support head size {head_dim}; supported "
                f"head sizes: {', '.join(map(str, self.head_dims))}"
            )


def clip_place(clip: float, head_dim: int) -> int:
    """Return the place of a row's bound among its magnitudes in ascending order.

    Args:
        clip: Percentile; 0 for no clip, whose bound is the last one.
        head_dim: Elements of the row.

    """
    return min(int(clip * head_dim), head_dim - 1) if clip else head_dim - 1


def _low_bit(key_bits: int, value_bits: int) -> FormatSpec:
    # What loses least on SmolLM2-135M under calibrated transforms (docs/lowbit.md).
    quantizers: dict[int, Quantizer] = {2: "codebook", 3: "codebook", 4: "affine"}
    return FormatSpec(
        f"polykv_k{key_bits}v{value_bits}",
        key_bits,
        value_bits,
        "hadamard",
        quantizers[key_bits],
        quantizers[value_bits],
    )


FORMATS: dict[str, FormatSpec] = {
    spec.name: spec
    for spec in (
        FormatSpec("polykv_k8v3", 8, 3, "hadamard"),
        FormatSpec("polykv_k7v4", 7, 4, "hadamard"),
        FormatSpec("polykv_k8v8", 8, 8, "none", value_quantizer="symmetric"),
        FormatSpec("polykv_k8v4", 8, 4, "hadamard"),
        _low_bit(4, 4),
        _low_bit(3, 3),
        _low_bit(3, 2),
        _low_bit(2, 2),
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

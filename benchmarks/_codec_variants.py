# SPDX-License-Identifier: Apache-2.0
"""What `benchmarks.codec` compares: sets of named pairs of a key and a value codec."""

from dataclasses import dataclass

from benchmarks import _codecs as codecs
from benchmarks._codecs import Codec, Gaussian
from polykv_vllm.formats import FORMATS, FormatSpec
from polykv_vllm.keys import TREATMENTS

BEST = "channel_scale_hadamard"


@dataclass(frozen=True)
class Variant:
    """One way to keep keys and values.

    Attributes:
        name: Of the row.
        key: Quantizes and dequantizes keys after their treatment.
        value: The same for values.
        bits: Of one element of a key and one of a value together; scales come on top.
        treatment: Of the keys, one of `keys.TREATMENTS`.

    """

    name: str
    key: Codec
    value: Codec
    bits: float
    treatment: str = "none"


def _ours(fmt: FormatSpec, treatment: str) -> Variant:
    name = f"{fmt.name.removeprefix('polykv_')}, keys {treatment}"
    key = codecs.symmetric(fmt.key_bits)
    bits = fmt.key_bits + fmt.value_bits
    return Variant(name, key, codecs.our_value(fmt), bits, treatment)


def _values(name: str, value: Codec, bits: float) -> Variant:
    return Variant(f"values {name}", codecs.exact, value, 16 + bits)


KEYS = tuple(
    Variant(f"keys int{bits}, {t}", codecs.symmetric(bits), codecs.exact, bits + 16, t)
    for bits in (8, 7, 6)
    for t in TREATMENTS
)
"""What a treatment does for the keys, the values left alone."""

VALUES = (
    *(
        _values(f"{bits} bits, scale by {scale}", Gaussian(bits, scale), bits)
        for bits in (3, 4)
        for scale in ("rms", "norm", "least_squares", "unbiased")
    ),
    *(
        _values(f"{bits} bits, {name}", codec, bits)
        for bits in (3, 4)
        for name, codec in (
            ("not rotated", Gaussian(bits, rotated=False)),
            ("uniform levels", Gaussian(bits, uniform=True)),
            ("one scale per tensor", Gaussian(bits, "tensor")),
        )
    ),
    _values("5 bits, scale by norm", Gaussian(5), 5),
)
"""How values are coded, the keys left alone."""

BYTES = (
    _ours(FORMATS["polykv_k8v3"], BEST),
    _ours(FORMATS["polykv_k7v4"], BEST),
    Variant("k6v5, keys " + BEST, codecs.symmetric(6), Gaussian(5), 11, BEST),
    _ours(FORMATS["polykv_k8v4"], BEST),
    _ours(FORMATS["polykv_k8v8"], BEST),
)
"""Where the bits go: the first three have the same bytes."""

FORMATS_AS_PUBLISHED = (
    *(_ours(FORMATS[name], "none") for name in ("polykv_k8v3", "polykv_k8v8")),
    Variant(
        "k8v3, one V scale per tensor, keys none",
        codecs.symmetric(8),
        Gaussian(3, "tensor"),
        11,
    ),
)
"""The published format and control, and its trap."""

VLLM = (
    Variant("vLLM fp8", codecs.fp8, codecs.fp8, 16),
    Variant("vLLM int8_per_token_head", codecs.symmetric(8), codecs.symmetric(8), 16),
    Variant("vLLM turboquant_k8v4", codecs.fp8, codecs.affine(4), 12),
    Variant("vLLM turboquant_4bit_nc", Gaussian(4), codecs.affine(4), 8),
    Variant(
        "vLLM int4_per_token_head",
        codecs.int4_per_token_head,
        codecs.int4_per_token_head,
        8,
    ),
)
"""vLLM's own formats, without the layers that it keeps in 16 bits."""

SETS: dict[str, tuple[Variant, ...]] = {
    "keys": KEYS,
    "values": VALUES,
    "bytes": BYTES,
    "published": FORMATS_AS_PUBLISHED,
    "vllm": VLLM,
}

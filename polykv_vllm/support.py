# SPDX-License-Identifier: Apache-2.0
"""Decides from a model's config whether it can be served. Imports no vllm, no torch.

The engine asks before it loads weights, `polykv check` asks without an engine: both
get the same answer from here.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Any

from polykv_vllm.architectures import ARCHITECTURES, HYBRID, REFUSED
from polykv_vllm.formats import FormatSpec, get_format

_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})


@dataclass(frozen=True)
class LayerShape:
    """What one attention layer keeps of a token.

    Attributes:
        num_kv_heads: KV heads.
        head_size: Elements of one head; 0 when the config does not say.

    """

    num_kv_heads: int
    head_size: int


@dataclass(frozen=True)
class Support:
    """The answer for one model and one cache dtype.

    Attributes:
        reasons: Why the model cannot be served; empty when it can.
        architecture: As in the config.
        fmt: The format, None when the cache dtype names none.
        layer_shapes: Of each attention layer.
        num_linear_layers: Linear-attention layers of a hybrid model: they keep a state
            of a fixed size, uncompressed.
        num_sliding_layers: Those with a sliding window.
        sliding_window: Tokens that those see, None without such layers.
        num_heads: Query heads.

    """

    reasons: tuple[str, ...]
    architecture: str
    fmt: FormatSpec | None
    layer_shapes: tuple[LayerShape, ...]
    num_linear_layers: int
    num_sliding_layers: int
    sliding_window: int | None
    num_heads: int

    @property
    def ok(self) -> bool:
        """Whether the model can be served."""
        return not self.reasons

    @property
    def num_layers(self) -> int:
        """Attention layers."""
        return len(self.layer_shapes)

    @property
    def num_kv_heads(self) -> int:
        """KV heads of the first attention layer."""
        return self.layer_shapes[0].num_kv_heads if self.layer_shapes else 0

    @property
    def head_size(self) -> int:
        """Elements of a head of the first attention layer; 0 when it is unknown."""
        return self.layer_shapes[0].head_size if self.layer_shapes else 0

    def layer_bytes_per_token(self, shape: LayerShape) -> int:
        """Cache bytes of one token in a layer; ValueError without a format."""
        if self.fmt is None:
            raise ValueError("no format, no bytes")
        return shape.num_kv_heads * self.fmt.slot_bytes(shape.head_size)

    @property
    def bytes_per_token(self) -> int:
        """Cache bytes of one token in all layers; ValueError unless `ok`."""
        return sum(map(self.layer_bytes_per_token, self.layer_shapes))

    def uncompressed_bytes_per_token(self, itemsize: int = 2) -> int:
        """The same for vLLM's own cache with `itemsize` bytes per element."""
        elements = sum(x.num_kv_heads * x.head_size for x in self.layer_shapes)
        return 2 * elements * itemsize

    def describe_layers(self) -> str:
        """Say how many layers have which shape: "28 layers, 8 KV heads x 128"."""
        counts = Counter(self.layer_shapes)
        return "; ".join(
            f"{_count(count, 'layer')}, {_count(x.num_kv_heads, 'KV head')} x "
            f"{x.head_size}"
            for x, count in counts.items()
        )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def check_model(hf_config: Any, cache_dtype: str) -> Support:
    """Say whether a model can be served with a cache dtype.

    Args:
        hf_config: The transformers config, or any object with its attributes.
        cache_dtype: A value of `--kv-cache-dtype` that is ours.

    Returns:
        The answer; all reasons are given, not only the first.

    """
    text_config = getattr(hf_config, "text_config", None) or hf_config
    num_heads = _number(text_config, "num_attention_heads")
    num_layers = _number(text_config, "num_hidden_layers")
    layer_types = list(getattr(text_config, "layer_types", None) or ())
    num_linear = layer_types.count("linear_attention")
    window = _sliding_window(text_config)
    num_sliding = layer_types.count("sliding_attention")
    if not layer_types and window:
        num_sliding = num_layers
    shapes = _layer_shapes(text_config, num_layers, num_heads, layer_types)
    try:
        fmt, format_reasons = get_format(cache_dtype), []
    except ValueError as error:
        fmt, format_reasons = None, [str(error)]
    return Support(
        reasons=(
            *format_reasons,
            *_architecture_reasons(hf_config),
            *attention_reasons(text_config, _served_layer_types(hf_config)),
            *_shape_reasons(shapes, num_heads, fmt),
        ),
        architecture=_architecture(hf_config),
        fmt=fmt,
        layer_shapes=shapes,
        num_linear_layers=num_linear,
        num_sliding_layers=num_sliding,
        sliding_window=window if num_sliding else None,
        num_heads=num_heads,
    )


def _layer_shapes(
    hf_config: Any, num_layers: int, num_heads: int, layer_types: list[str]
) -> tuple[LayerShape, ...]:
    """Return the shape of each layer with attention."""
    configs = [hf_config] * num_layers
    if getattr(hf_config, "is_heterogeneous", False):
        configs = [hf_config.per_layer_config[i] for i in range(num_layers)]
    return tuple(
        LayerShape(_num_kv_heads(config) or num_heads, _head_size(config, num_heads))
        for i, config in enumerate(configs)
        if layer_types[i : i + 1] != ["linear_attention"]
    )


def _number(hf_config: Any, name: str) -> int:
    """Return a number of the config, 0 where it has none for all layers."""
    try:
        value = getattr(hf_config, name, None)
    except RuntimeError:  # transformers refuses: it is an attribute of each layer
        return 0
    return value if isinstance(value, int) else 0


def _head_size(hf_config: Any, num_heads: int) -> int:
    """Return the head size, 0 where the config does not say."""
    head_size = _number(hf_config, "head_dim")
    if not head_size and num_heads:
        return _number(hf_config, "hidden_size") // num_heads
    return head_size


def _num_kv_heads(hf_config: Any) -> int:
    """Return the number of KV heads, 0 where the config does not say."""
    if getattr(hf_config, "model_type", None) == "falcon":
        # `num_kv_heads` is set in both generations and holds in the newer one only.
        if getattr(hf_config, "new_decoder_architecture", False):
            return _number(hf_config, "num_kv_heads")
        return 1 if getattr(hf_config, "multi_query", False) else 0
    return _number(hf_config, "num_key_value_heads")


def _served_layer_types(hf_config: Any) -> frozenset[str]:
    is_hybrid = _architecture(hf_config) in HYBRID
    return _LAYER_TYPES | {"linear_attention"} if is_hybrid else _LAYER_TYPES


def _sliding_window(hf_config: Any) -> int | None:
    if getattr(hf_config, "use_sliding_window", True) is False:
        return None
    return _number(hf_config, "sliding_window") or None


def _architecture(hf_config: Any) -> str:
    architectures = getattr(hf_config, "architectures", None) or ()
    return next(iter(architectures), getattr(hf_config, "model_type", "unknown"))


def _architecture_reasons(hf_config: Any) -> list[str]:
    """The family, and what makes some of the others impossible."""
    reasons = []
    if getattr(hf_config, "is_encoder_decoder", False):
        reasons.append("it is an encoder-decoder model; decoder-only ones are served")
    if getattr(hf_config, "kv_lora_rank", None) is not None:
        reasons.append(
            "it uses multi-head latent attention (MLA), whose cache is a joint latent "
            "and not keys and values per head"
        )
    architecture = _architecture(hf_config)
    if not getattr(hf_config, "architectures", None):
        reasons.append(
            f"its config names no class (architectures), only the type {architecture}; "
            "vLLM needs both"
        )
    elif architecture in REFUSED:
        reasons.append(f"the architecture {architecture} {REFUSED[architecture]}")
    elif architecture not in ARCHITECTURES and not reasons:
        known = ", ".join(sorted(set(ARCHITECTURES.values())))
        reasons.append(
            f"the architecture {architecture} is not served: it was not tested; "
            f"served: {known}"
        )
    return reasons


def attention_reasons(
    hf_config: Any, layer_types: frozenset[str] = _LAYER_TYPES
) -> list[str]:
    """Return which kinds of attention a model has that the kernels do not compute.

    Args:
        hf_config: See `check_model`.
        layer_types: The types of layers that are possible.

    """
    served = "served is causal attention, full or with a sliding window"
    found = []
    if getattr(hf_config, "use_bidirectional_attention", False):
        found.append("attends in both directions (use_bidirectional_attention)")
    if getattr(hf_config, "is_causal", True) is False:
        found.append("is not causal (is_causal)")
    if getattr(hf_config, "dual_chunk_attention_config", None):
        found.append("uses dual chunk attention (dual_chunk_attention_config)")
    if shared := _number(hf_config, "num_kv_shared_layers"):
        found.append(
            f"shares keys and values between layers (num_kv_shared_layers={shared})"
        )
    others = set(getattr(hf_config, "layer_types", None) or ()) - layer_types
    if others:
        found.append(f"has layers of type {', '.join(sorted(others))}")
    return [f"it {reason}; {served}" for reason in found]


def _shape_reasons(
    shapes: tuple[LayerShape, ...], num_heads: int, fmt: FormatSpec | None
) -> list[str]:
    head_sizes = dict.fromkeys(shape.head_size for shape in shapes)
    if not (head_sizes and num_heads and all(head_sizes)):
        lacking = "num_hidden_layers, num_attention_heads or the size of the heads"
        return [f"its config lacks {lacking}"]
    if fmt is None:
        return []
    reasons = []
    for head_size in head_sizes:
        try:
            fmt.check_head_dim(head_size)
        except ValueError as error:
            reasons.append(str(error))
    return reasons

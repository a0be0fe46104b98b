# SPDX-License-Identifier: Apache-2.0
"""Reads what a loaded model's weights say about the keys of one attention layer.

The weights are asked, not read: the projection is applied to an identity matrix, the
norms to vectors of ones. So it does not matter how a weight is stored (quantized,
packed for the CPU's matrix units and its original dropped, a shard of it), and a norm's
gain is what it does (Gemma's is 1 + weight).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from polykv_vllm.attention.projection_layout import (
    ProjectionLayout,
    projection_layout,
    split_rows,
)
from polykv_vllm.keys import KeyProjection, RotaryPairs, after_head_norm

_CHUNK_ELEMENTS = 1 << 22  # of the projection's output: 8 MiB in bf16


class UnreadableError(Exception):
    """The layer is not built from the pieces that are known; the message says why."""


@torch.no_grad()
def read_key_projection(
    modules: dict[str, torch.nn.Module], name: str, impl: Any, dtype: torch.dtype
) -> KeyProjection:
    """Describe the keys and queries of one layer, as this worker has them.

    Args:
        modules: The model's modules by name.
        name: Of the attention layer, such as "model.layers.3.self_attn.attn".
        impl: The layer's implementation: its head counts.
        dtype: Of the model's activations.

    Raises:
        UnreadableError: The module around the layer has other parts than expected.

    """
    parent_name = name.rpartition(".")[0]
    parent = modules[parent_name]
    block = modules.get(parent_name.rpartition(".")[0])
    layout = projection_layout(parent)
    projection = _part(parent, layout.projection)
    norms = {
        "q": _head_norm(parent, "q", impl.num_heads, impl.head_size, dtype),
        "k": _head_norm(parent, "k", impl.num_kv_heads, impl.head_size, dtype),
    }
    rotary = _rotary(parent, layout, impl)
    size = projection.input_size
    # Where nothing normalizes the inputs, they are taken to be alike in all channels;
    # such a module normalizes queries and keys, so that their size does not matter.
    gain, shift = torch.ones(size), torch.zeros(size)
    if layout.input_norms is not None:
        gain, shift = _norm_effect(_input_norm(block, layout), size, dtype)
    bias, spread = (
        _split(x, layout, impl) for x in _probe(projection, gain, shift, dtype)
    )
    split = {"q": (bias[0], spread[0]), "k": (bias[1], spread[1])}
    for kind, norm in norms.items():
        if norm is not None:
            split[kind] = _after_norm(*split[kind], *norm)
    return KeyProjection(*split["k"], *split["q"], rotary)


def _split(
    outputs: torch.Tensor, layout: ProjectionLayout, impl: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the queries' and the keys' part, `[heads, head_size]` each."""
    counts = (impl.num_heads, impl.num_kv_heads)
    split = split_rows(outputs, layout.rows, *counts, impl.head_size)
    if split is None:
        heads = (*counts, impl.num_kv_heads)
        raise UnreadableError(
            f"{layout.projection} has {outputs.shape[0]} outputs where queries, keys "
            f"and values of {heads} heads of {impl.head_size} have "
            f"{sum(heads) * impl.head_size} (rows in {layout.rows})"
        )
    return split


def _input_norm(block: torch.nn.Module | None, layout: ProjectionLayout) -> Any:
    """Return the norm before the projection."""
    names = layout.input_norms or ()
    present = [name for name in names if hasattr(block, name)]
    return _part(block, next(iter(present), names[-1]))


def _after_norm(
    bias: torch.Tensor, spread: torch.Tensor, gain: torch.Tensor, shift: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Apply a norm of each head, or of all heads together, to bias and spread."""
    rows = (-1, gain.shape[0])
    normed = after_head_norm(bias.reshape(rows), spread.reshape(rows), gain, shift)
    return normed[0].view(bias.shape), normed[1].view(bias.shape)


def _part(module: torch.nn.Module | None, name: str) -> Any:
    part = getattr(module, name, None)
    if part is None:
        kind = "nothing" if module is None else type(module).__name__
        raise UnreadableError(f"{kind} around the attention layer has no {name}")
    return part


def _first(output: Any) -> torch.Tensor:
    """Return the output of a module that may return a tuple."""
    return output[0] if isinstance(output, tuple) else output


@contextmanager
def _bias(projection: Any, is_added: bool) -> Iterator[None]:
    """Have a linear layer of vLLM's add its bias, or leave it to the caller.

    Beside a bias of some hundreds a weight would be lost to bf16's rounding.
    """
    if not isinstance(getattr(projection, "skip_bias_add", None), bool):
        raise UnreadableError(
            f"the projection is a {type(projection).__name__}, no linear layer of vLLM"
        )
    before = projection.skip_bias_add
    projection.skip_bias_add = not is_added
    try:
        yield
    finally:
        projection.skip_bias_add = before


def _probe(
    projection: Any, gain: torch.Tensor, shift: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return bias and spread of the outputs, `[outputs]` fp32.

    Args:
        projection: A linear layer.
        gain: `[inputs]` fp32, of the norm before it.
        shift: `[inputs]` fp32, what that norm adds.
        dtype: Of its inputs.

    """
    size = gain.shape[0]
    zeros = torch.zeros(1, size, dtype=dtype)
    with _bias(projection, is_added=True):
        bias = _first(projection(zeros))[0].float()
    square = torch.zeros_like(bias)
    count = max(1, _CHUNK_ELEMENTS // max(bias.shape[0], size))
    with _bias(projection, is_added=False):
        for first in range(0, size, count):
            rows = min(count, size - first)
            inputs = torch.zeros(rows, size, dtype=dtype)
            inputs[:, first : first + rows].fill_diagonal_(1)
            weight = _first(projection(inputs)).float()
            bias += shift[first : first + rows] @ weight
            square += gain[first : first + rows].square() @ weight.square()
    return bias, square.sqrt()


def _norm_effect(
    norm: Any, size: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return gain and shift of a norm over `size` channels, `[size]` fp32.

    A vector of alternating signs has mean 0 and root mean square 1: an RMS norm and a
    layer norm leave it alone, but for their weights.
    """
    weight = getattr(norm, "weight", None)
    is_plain = weight is None and not list(norm.parameters())
    if not is_plain and (weight is None or weight.numel() != size):
        shape = None if weight is None else list(weight.shape)
        raise UnreadableError(
            f"{type(norm).__name__} has a weight of shape {shape}, not [{size}]"
        )
    signs = torch.ones(size)
    signs[1::2] = -1
    both = _first(norm(torch.stack((signs, -signs)).to(dtype))).float()
    return (both[0] - both[1]) / 2 * signs, (both[0] + both[1]) / 2


def _head_norm(
    parent: torch.nn.Module, kind: str, heads: int, head_size: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return what the norm of the query or key heads does, None without one.

    It is one of each head, `[head_size]`, or of all together, `[heads * head_size]`.
    """
    known = ("q_norm", "k_norm", "v_norm")
    for name, child in parent.named_children():
        if "norm" in type(child).__name__.lower() and name not in known:
            raise UnreadableError(f"what {type(child).__name__} {name} does is unknown")
    norm = getattr(parent, f"{kind}_norm", None)
    if norm is None:
        return None
    width = getattr(norm, "weight", torch.empty(0)).numel()
    size = width if width == heads * head_size else head_size
    return _norm_effect(norm, size, dtype)


def _rotary(
    parent: torch.nn.Module, layout: ProjectionLayout, impl: Any
) -> RotaryPairs | None:
    """Return which channels RoPE pairs; None without RoPE."""
    if layout.rotates_halves:
        return RotaryPairs(getattr(parent, "rotary_ndims", impl.head_size))
    rotary: Any = getattr(parent, "rotary_emb", None)
    if rotary is None and (impl.has_alibi or hasattr(parent, "rotary_emb")):
        return None
    if rotary is None:
        raise UnreadableError(f"{type(parent).__name__} has no rotary_emb")
    dim: Any = getattr(rotary, "rotary_dim", None)
    is_neox = getattr(rotary, "is_neox_style", None)
    is_known = isinstance(dim, int) and isinstance(is_neox, bool)
    if not is_known or dim > impl.head_size:
        raise UnreadableError(f"what {type(rotary).__name__} rotates is unknown")
    return RotaryPairs(dim, "neox" if is_neox else "gptj")

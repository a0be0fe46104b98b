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

from polykv_vllm.keys import KeyProjection, RotaryPairs, after_head_norm

_CHUNK_ELEMENTS = 1 << 22  # of the projection's output: 8 MiB in bf16


class UnreadableError(Exception):
    """The layer is not built from the pieces that are known; the message says why."""


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
    projection = _part(parent, "qkv_proj")
    norms = {kind: _head_norm(parent, kind, impl, dtype) for kind in ("q", "k")}
    rotary = _rotary(parent, impl.head_size)
    size = projection.input_size
    gain, shift = _norm_effect(_part(block, "input_layernorm"), size, dtype)
    bias, spread = _probe(projection, gain, shift, dtype)
    counts = (impl.num_heads, impl.num_kv_heads, impl.num_kv_heads)
    expected = sum(counts) * impl.head_size
    if bias.shape[0] != expected:
        raise UnreadableError(
            f"qkv_proj has {bias.shape[0]} outputs where queries, keys and values of "
            f"{counts} heads of {impl.head_size} have {expected}"
        )
    rows = [count * impl.head_size for count in counts]
    biases = [x.view(-1, impl.head_size) for x in bias.split(rows)]
    spreads = [x.view(-1, impl.head_size) for x in spread.split(rows)]
    split = {"q": (biases[0], spreads[0]), "k": (biases[1], spreads[1])}
    for kind, norm in norms.items():
        if norm is not None:
            split[kind] = after_head_norm(*split[kind], *norm)
    return KeyProjection(*split["k"], *split["q"], rotary)


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
def _without_bias(projection: Any) -> Iterator[None]:
    """Have a linear layer of vLLM's leave its bias to the caller.

    Beside a bias of some hundreds a weight would be lost to bf16's rounding.
    """
    if not isinstance(getattr(projection, "skip_bias_add", None), bool):
        raise UnreadableError(
            f"qkv_proj is a {type(projection).__name__}, no linear layer of vLLM"
        )
    before = projection.skip_bias_add
    projection.skip_bias_add = True
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
    bias = _first(projection(zeros))[0].float()
    square = torch.zeros_like(bias)
    count = max(1, _CHUNK_ELEMENTS // max(bias.shape[0], size))
    with _without_bias(projection):
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
    if weight is None or weight.numel() != size:
        shape = None if weight is None else list(weight.shape)
        raise UnreadableError(
            f"{type(norm).__name__} has a weight of shape {shape}, not [{size}]"
        )
    signs = torch.ones(size)
    signs[1::2] = -1
    both = _first(norm(torch.stack((signs, -signs)).to(dtype))).float()
    return (both[0] - both[1]) / 2 * signs, (both[0] + both[1]) / 2


def _head_norm(
    parent: torch.nn.Module, kind: str, impl: Any, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return what the norm of the query or key heads does, None without one."""
    known = ("q_norm", "k_norm")
    for name, child in parent.named_children():
        if "norm" in type(child).__name__.lower() and name not in known:
            raise UnreadableError(f"what {type(child).__name__} {name} does is unknown")
    norm = getattr(parent, f"{kind}_norm", None)
    return None if norm is None else _norm_effect(norm, impl.head_size, dtype)


def _rotary(parent: torch.nn.Module, head_size: int) -> RotaryPairs | None:
    if not hasattr(parent, "rotary_emb"):
        raise UnreadableError(f"{type(parent).__name__} has no rotary_emb")
    rotary: Any = parent.rotary_emb
    if rotary is None:
        return None
    dim, is_neox = (getattr(rotary, n, None) for n in ("rotary_dim", "is_neox_style"))
    if not isinstance(dim, int) or not isinstance(is_neox, bool) or dim > head_size:
        raise UnreadableError(f"what {type(rotary).__name__} rotates is unknown")
    return RotaryPairs(dim, "neox" if is_neox else "gptj")

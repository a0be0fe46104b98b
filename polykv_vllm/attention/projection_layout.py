# SPDX-License-Identifier: Apache-2.0
"""Where the parts of an attention module are that make its keys.

Most of vLLM's modules are built like Llama's. Those that are not are listed here, by
the name of their class: vLLM's own, and those of transformers, which vLLM serves with
its own linear layers put into them.
"""

from dataclasses import dataclass
from typing import Literal

import torch

Rows = Literal["blocks", "heads", "gated"]
"""How a projection's outputs lie:

    blocks    all queries, all keys, all values
    heads     query, key and value of the first head, then of the next
    gated     blocks, with a gate of the output after each head's query
"""


@dataclass(frozen=True)
class ProjectionLayout:
    """The parts of one kind of attention module.

    Attributes:
        projection: Name of the linear layer that makes queries, keys and values.
        input_norms: Names of the norm before it, in the module around: the first that
            is there counts. None: nothing normalizes what enters.
        rows: See `Rows`.
        rotates_halves: RoPE is not in the module, which gets sines and cosines and
            rotates channel i with i + half, of `rotary_ndims` or of all channels.

    """

    projection: str = "qkv_proj"
    input_norms: tuple[str, ...] | None = ("input_layernorm",)
    rows: Rows = "blocks"
    rotates_halves: bool = False


_LAYOUTS: dict[str, ProjectionLayout] = {
    "BloomAttention": ProjectionLayout("query_key_value"),
    "FalconAttention": ProjectionLayout(
        "query_key_value", ("ln_attn", "input_layernorm")
    ),
    "GPTNeoXAttention": ProjectionLayout(
        "query_key_value", rows="heads", rotates_halves=True
    ),
    "OlmoAttention": ProjectionLayout(rotates_halves=True),
    "Olmo2Attention": ProjectionLayout(input_norms=None, rotates_halves=True),
    "Olmo3Attention": ProjectionLayout(input_norms=None, rotates_halves=True),
    "PhiAttention": ProjectionLayout(rotates_halves=True),
    "Qwen3NextAttention": ProjectionLayout(rows="gated"),
}


def projection_layout(module: torch.nn.Module) -> ProjectionLayout:
    """Return where the parts of an attention module are."""
    return _LAYOUTS.get(type(module).__name__, ProjectionLayout())


def split_rows(
    outputs: torch.Tensor, rows: Rows, num_heads: int, num_kv_heads: int, head_size: int
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return what belongs to the queries and to the keys.

    Args:
        outputs: `[outputs]`, something about each output of a projection.
        rows: How they lie.
        num_heads: Query heads.
        num_kv_heads: KV heads.
        head_size: Channels of a head.

    Returns:
        `[num_heads, head_size]` and `[num_kv_heads, head_size]`; None when there are
        more or fewer outputs than such heads have.

    """
    query_parts = 2 if rows == "gated" else 1
    num_parts = num_heads * query_parts + 2 * num_kv_heads
    if outputs.shape[0] != num_parts * head_size:
        return None
    if rows == "heads":
        if num_heads != num_kv_heads:
            return None
        query, key, _ = outputs.view(num_heads, 3, head_size).unbind(1)
        return query, key
    parts = outputs.view(-1, head_size)
    first_key = num_heads * query_parts
    query = parts[:first_key].view(num_heads, query_parts, head_size)[:, 0]
    return query, parts[first_key : first_key + num_kv_heads]

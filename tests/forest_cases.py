# SPDX-License-Identifier: Apache-2.0
"""Batches whose requests share blocks: prefixes, nested prefixes, private suffixes."""

from dataclasses import dataclass

import torch
from hypothesis import strategies as st

from polykv_vllm import ops
from polykv_vllm.formats import FormatSpec
from tests.kernel_cases import FASTEST, Batch, new_cache


@dataclass(frozen=True)
class Node:
    """A prompt, or the continuation of another one.

    Attributes:
        parent: Number of the node that it continues; None for a beginning.
        blocks: Its own length.

    """

    parent: int | None
    blocks: int


@dataclass(frozen=True)
class Reader:
    """A request: a node's whole prompt, own tokens, and how many of them are queries.

    Attributes:
        node: What it starts with; None for nothing.
        own_tokens: At least as many as queries. With 0 the last tokens of the shared
            blocks are its queries.
        queries: Query tokens; 0 for a padding entry of the batch.

    """

    node: int | None
    own_tokens: int
    queries: int


@dataclass(frozen=True)
class Tables:
    """Block tables of a batch; `query_lens` and `seq_lens` by request."""

    block_table: torch.Tensor
    seq_lens: list[int]
    query_lens: list[int]
    num_blocks: int


def make_tables(
    nodes: list[Node], readers: list[Reader], block_size: int, seed: int = 0
) -> Tables:
    """Give every node its blocks once and every reader blocks of its own."""
    generator = torch.Generator().manual_seed(seed)
    own = [-(-reader.own_tokens // block_size) for reader in readers]
    total = sum(node.blocks for node in nodes) + sum(own)
    free = iter((torch.randperm(total, generator=generator) + 1).tolist())
    prompts: list[list[int]] = []
    for node in nodes:
        before = [] if node.parent is None else prompts[node.parent]
        prompts.append(before + [next(free) for _ in range(node.blocks)])
    tables, seq_lens, query_lens = [], [], []
    for reader, count in zip(readers, own, strict=True):
        prompt = [] if reader.node is None else prompts[reader.node]
        tables.append(prompt + [next(free) for _ in range(count)])
        length = len(prompt) * block_size + reader.own_tokens
        seq_lens.append(length)
        query_lens.append(min(reader.queries, length))
    width = max(map(len, tables), default=0) + 1
    padded = [table + [0] * (width - len(table)) for table in tables]
    block_table = torch.tensor(padded, dtype=torch.int32).reshape(len(tables), width)
    return Tables(block_table, seq_lens, query_lens, total + 1)


def make_forest_batch(
    tables: Tables,
    fmt: FormatSpec,
    block_size: int,
    *,
    head_dim: int = 64,
    kv_heads: int = 1,
    group: int = 3,
    window: int = -1,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Batch:
    """Fill every block with random keys and values and draw the queries."""
    generator = torch.Generator().manual_seed(seed)
    cache = new_cache(fmt, head_dim, block_size, tables.num_blocks, kv_heads)
    slots = torch.arange(block_size, tables.num_blocks * block_size)
    shape = (slots.shape[0], kv_heads, head_dim)
    key, value = (
        torch.randn(shape, generator=generator).to(dtype) for _ in ("key", "value")
    )
    ops.reshape_and_cache(key, value, cache, slots, fmt, isa=FASTEST)
    starts = torch.tensor([0, *tables.query_lens]).cumsum(0).int()
    query = torch.randn(
        (int(starts[-1]), kv_heads * group, head_dim), generator=generator
    )
    return Batch(
        query.to(dtype),
        cache,
        tables.block_table,
        torch.tensor(tables.seq_lens, dtype=torch.int32),
        starts,
        fmt,
        head_dim**-0.5,
        window,
    )


@st.composite
def forests(
    draw: st.DrawFn, block_size: int, max_tokens: int = 700
) -> tuple[list[Node], list[Reader]]:
    """Up to four prompts, some nested, and up to nine readers of any phase."""
    most = max_tokens // block_size
    nodes = []
    for i in range(draw(st.integers(1, 4))):
        parent = draw(st.none() | st.integers(0, i - 1)) if i else None
        nodes.append(Node(parent, draw(st.integers(1, most))))
    # Decode, verification of drafts, prefill, padding.
    phases = st.sampled_from([1, 1, 1, 1, 4, 30, 0])
    readers = []
    for _ in range(draw(st.integers(2, 9))):
        node = draw(st.none() | st.integers(0, len(nodes) - 1))
        queries = draw(phases)
        least = 1 if node is None else 0
        own = draw(st.integers(least, 150))
        readers.append(Reader(node, max(own, queries if node is None else 0), queries))
    return nodes, readers

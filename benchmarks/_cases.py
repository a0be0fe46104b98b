# SPDX-License-Identifier: Apache-2.0
"""What the kernel benchmarks compute: shapes, phases, and one batch of tensors."""

from dataclasses import dataclass

import torch

BLOCK_SIZE = 128  # vLLM's default on the CPU


@dataclass(frozen=True)
class Shape:
    """Heads of one attention layer."""

    num_heads: int
    num_kv_heads: int
    head_dim: int

    @classmethod
    def parse(cls, text: str) -> "Shape":
        """Read `heads/KV heads/head size`, e.g. `9/3/64`.

        Raises:
            ValueError: It is not of that form, or the heads do not divide.

        """
        parts = text.split("/")
        if len(parts) != 3 or not all(part.isdecimal() for part in parts):
            raise ValueError(f"shape {text!r} is not HEADS/KV_HEADS/HEAD_SIZE")
        shape = cls(*map(int, parts))
        if not shape.num_kv_heads or shape.num_heads % shape.num_kv_heads:
            raise ValueError(f"shape {text!r}: heads are no multiple of KV heads")
        return shape

    def __str__(self) -> str:
        return f"{self.num_heads}/{self.num_kv_heads}/{self.head_dim}"


@dataclass(frozen=True)
class Case:
    """One attention call.

    Attributes:
        shape: Heads.
        context: Tokens cached per sequence, the query's own included.
        query_len: Query tokens per sequence; 1 is decode.
        agents: Sequences. They share all blocks but the last, as with vLLM's prefix
            cache.
        required: Least ratio to vLLM's AVX-512 path, where one is asked for.
        required_fast: The same with the fast arithmetic.

    """

    shape: Shape
    context: int
    query_len: int = 1
    agents: int = 1
    required: float | None = None
    required_fast: float | None = None

    def __str__(self) -> str:
        if self.query_len > 1:
            return f"prefill {self.query_len} over {self.context - self.query_len}"
        return f"decode over {self.context}"


@dataclass(frozen=True)
class Batch:
    """Tensors of a case.

    Attributes:
        key: `[num_blocks * BLOCK_SIZE, num_kv_heads, head_dim]` bf16, in slot order.
        value: Like `key`.
        query: `[agents * query_len, num_heads, head_dim]` bf16.
        block_table: `[agents, blocks per sequence]` int32.
        seq_lens: `[agents]` int32.
        query_start_loc: `[agents + 1]` int32.
        scale: Softmax scale.

    """

    key: torch.Tensor
    value: torch.Tensor
    query: torch.Tensor
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    query_start_loc: torch.Tensor
    scale: float

    @property
    def num_blocks(self) -> int:
        """Blocks of the cache."""
        return self.key.shape[0] // BLOCK_SIZE

    @property
    def slots(self) -> torch.Tensor:
        """Every slot of the cache, `[num_blocks * BLOCK_SIZE]` int64."""
        return torch.arange(self.key.shape[0])


def make_batch(case: Case, seed: int = 0) -> Batch:
    """Draw a batch: normal keys, values and queries.

    Blocks are numbered at random, as in an engine that has been running.
    """
    generator = torch.Generator().manual_seed(seed)
    shape, agents = case.shape, case.agents
    width = -(-case.context // BLOCK_SIZE)
    num_blocks = width - 1 + agents
    numbers = torch.randperm(num_blocks, generator=generator).to(torch.int32)
    table = numbers[:width].repeat(agents, 1)
    table[:, -1] = numbers[width - 1 :]

    def rows(tokens: int, heads: int) -> torch.Tensor:
        size = (tokens, heads, shape.head_dim)
        return torch.randn(size, generator=generator).bfloat16()

    return Batch(
        key=rows(num_blocks * BLOCK_SIZE, shape.num_kv_heads),
        value=rows(num_blocks * BLOCK_SIZE, shape.num_kv_heads),
        query=rows(agents * case.query_len, shape.num_heads),
        block_table=table,
        seq_lens=torch.full((agents,), case.context, dtype=torch.int32),
        query_start_loc=torch.arange(agents + 1, dtype=torch.int32) * case.query_len,
        scale=shape.head_dim**-0.5,
    )

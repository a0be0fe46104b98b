# SPDX-License-Identifier: Apache-2.0
"""The arms of the kernel benchmarks: our ops and vLLM's own CPU kernel.

An arm holds copies of one filled cache (see _timing.py) and writes its result into
`output`. It also says what it should have computed: ours attention over the
dequantized cache, vLLM's over the bf16 keys and values.
"""

from functools import cache

import torch

from benchmarks import _vllm_library
from benchmarks._cases import BLOCK_SIZE, Batch
from polykv_vllm import ops
from polykv_vllm.formats import FormatSpec
from polykv_vllm.reference import attention as reference
from polykv_vllm.reference.cache import gather


class PolykvKernel:
    """`ops.paged_attention` as a layer of the engine calls it.

    Like vLLM's scheduler metadata, the batch and its prefix forest, which an engine
    makes once per step for all layers, are not timed.
    """

    def __init__(
        self,
        batch: Batch,
        fmt: FormatSpec,
        isa: str,
        threads: int,
        *,
        sharing: bool = True,
        fast: bool = False,
    ) -> None:
        self.batch, self.fmt, self.isa, self.threads = batch, fmt, isa, threads
        self.is_fast = fast
        self.output = torch.empty_like(batch.query)
        num_kv_heads, head_dim = batch.key.shape[1:]
        shape = (batch.num_blocks, num_kv_heads, BLOCK_SIZE)
        first = torch.zeros(*shape, fmt.slot_bytes(head_dim), dtype=torch.uint8)
        self.copies = first.unsqueeze(0)
        tables = (batch.block_table, batch.seq_lens, batch.query_start_loc)
        group = batch.query.shape[1] // num_kv_heads
        forest = ops.build_prefix_forest(*tables, BLOCK_SIZE, group)
        self._tables = ops.AttentionBatch(*tables, forest if sharing else None)
        self._layer = ops.layer_attention(
            fmt, batch.scale, fast=fast, isa=isa, num_threads=threads
        )
        self.store()

    def store(self) -> None:
        """Fill the first copy of the cache."""
        batch = self.batch
        ops.reshape_and_cache(
            batch.key,
            batch.value,
            self.copies[0],
            batch.slots,
            self.fmt,
            isa=self.isa,
            num_threads=self.threads,
        )

    def use_copies(self, number: int) -> None:
        """Read from `number` copies in turn."""
        self.copies = _repeat(self.copies[0], number)

    def __call__(self, round_number: int) -> None:
        """Run once."""
        cache = self.copies[round_number % len(self.copies)]
        self._layer(self.batch.query, cache, self.output, self._tables)

    def expected(self) -> torch.Tensor:
        """Return fp32 attention over the dequantized cache, shaped like `output`."""
        batch = self.batch
        blocks = torch.arange(batch.num_blocks)
        tokens = batch.num_blocks * BLOCK_SIZE
        head_dim = batch.key.shape[-1]
        return _attention(
            batch, *gather(self.copies[0], blocks, tokens, head_dim, self.fmt)
        )


class VllmKernel:
    """vLLM's CPU attention over a bf16 cache, on one of its paths.

    Its per-step scheduler metadata, which an engine computes once for all layers, is
    made beforehand and not timed.
    """

    def __init__(self, batch: Batch, path: str) -> None:
        import_vllm_kernels()
        from vllm import _custom_ops

        self.batch, self.path, self._ops = batch, path, _custom_ops
        self.output = torch.empty_like(batch.query)
        num_kv_heads, head_dim = batch.key.shape[1:]
        first = torch.zeros(
            (batch.num_blocks, num_kv_heads, 2 * BLOCK_SIZE, head_dim),
            dtype=torch.bfloat16,
        )
        self.copies = first.unsqueeze(0)
        self.store()
        self._metadata = _custom_ops.cpu_attn_get_scheduler_metadata(
            num_reqs=batch.seq_lens.shape[0],
            num_heads=batch.query.shape[1],
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            seq_lens=batch.seq_lens,
            dtype=torch.bfloat16,
            query_start_loc=batch.query_start_loc,
            causal=True,
            sliding_window_size=-1,
            isa=path,
            enable_kv_split=True,
        )

    def store(self) -> None:
        """Fill the first copy of the cache."""
        key_cache, value_cache = self.copies[0].chunk(2, dim=2)
        batch = self.batch
        self._ops.cpu_attn_reshape_and_cache(
            batch.key, batch.value, key_cache, value_cache, batch.slots, self.path
        )

    def use_copies(self, number: int) -> None:
        """Read from `number` copies in turn."""
        self.copies = _repeat(self.copies[0], number)

    def __call__(self, round_number: int) -> None:
        """Run once."""
        batch = self.batch
        copy = self.copies[round_number % len(self.copies)]
        key_cache, value_cache = copy.chunk(2, dim=2)
        self._ops.cpu_attention_with_kv_cache(
            query=batch.query,
            key_cache=key_cache,
            value_cache=value_cache,
            output=self.output,
            query_start_loc=batch.query_start_loc,
            seq_lens=batch.seq_lens,
            scale=batch.scale,
            causal=True,
            alibi_slopes=None,
            sliding_window=-1,
            block_table=batch.block_table,
            softcap=0,
            scheduler_metadata=self._metadata,
            s_aux=None,
        )

    def expected(self) -> torch.Tensor:
        """Return fp32 attention over the bf16 keys and values."""
        return _attention(self.batch, self.batch.key.float(), self.batch.value.float())


Kernel = PolykvKernel | VllmKernel


@cache
def import_vllm_kernels() -> None:
    """Load vLLM's compiled operations into this process."""
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    if torch.cpu._is_amx_tile_supported():
        torch.cpu._init_amx()


def vllm_paths() -> dict[str, str]:
    """Return {path: name} of vLLM's attention paths on this CPU, the general first."""
    return _vllm_library.paths()


def vllm_choice(head_dim: int) -> str:
    """Return the path that vLLM itself takes here for a bf16 model."""
    return _vllm_library.choice(head_dim, BLOCK_SIZE)


def relative_error(output: torch.Tensor, expected: torch.Tensor) -> float:
    """Return ||output - expected|| / ||expected||; NaN where one of them has NaN."""
    difference = output.float() - expected
    return float(difference.norm() / expected.norm())


def _repeat(first: torch.Tensor, number: int) -> torch.Tensor:
    """Return `[number, ...]`: own memory for every copy of `first`."""
    return first.unsqueeze(0).repeat(number, *[1] * first.dim())


def _attention(batch: Batch, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Reference attention; `key` and `value` are fp32, in slot order."""
    expected = torch.empty(batch.query.shape)
    offsets = torch.arange(BLOCK_SIZE)
    starts = batch.query_start_loc.tolist()
    for request, seq_len in enumerate(batch.seq_lens.tolist()):
        blocks = batch.block_table[request].long().unsqueeze(1)
        slots = (blocks * BLOCK_SIZE + offsets).flatten()[:seq_len]
        rows = slice(starts[request], starts[request + 1])
        expected[rows] = reference.attention(
            batch.query[rows].float(), key[slots], value[slots], batch.scale
        )
    return expected

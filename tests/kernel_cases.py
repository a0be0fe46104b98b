# SPDX-License-Identifier: Apache-2.0
"""Paged batches with random contents, their fp64 oracle and its derived tolerance."""

import math
from dataclasses import dataclass, replace

import torch

from polykv_vllm import ops
from polykv_vllm.formats import FORMATS, FormatSpec
from polykv_vllm.keys import KeyTransform
from polykv_vllm.ops.reference import request_windows
from polykv_vllm.reference.attention import Exact
from polykv_vllm.reference.pack import unpack_tile
from polykv_vllm.reference.quantize import dequantize_key, dequantize_value

ALL_ISAS = ops.available_isas()
CPP_ISAS = tuple(isa for isa in ALL_ISAS if isa != "reference")
FASTEST = CPP_ISAS[0]
FORMAT_LIST = list(FORMATS.values())
# What has kernels for GPUs.
BYTE_KEYS = [fmt for fmt in FORMAT_LIST if not fmt.is_low_bit]
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def new_cache(
    fmt: FormatSpec, head_dim: int, block_size: int, num_blocks: int, heads: int
) -> torch.Tensor:
    """Return one layer of an LBHNC cache whose every byte is garbage.

    `[num_blocks, heads, block_size, slot_bytes]` uint8; the blocks of two layers
    alternate in memory, so the block stride exceeds what a block holds.
    """
    shape = (num_blocks, 2, heads, block_size, fmt.slot_bytes(head_dim))
    return torch.randint(0, 256, shape, dtype=torch.uint8)[:, 1]


@dataclass(frozen=True)
class Batch:
    """Arguments of `ops.paged_attention`, in its order and shapes.

    A batch with windows (`window_cases.with_windows`) is neither selected from nor cut
    into chunks: what is in pages differs.
    """

    query: torch.Tensor
    kv_cache: torch.Tensor
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    query_start_loc: torch.Tensor
    fmt: FormatSpec
    scale: float
    window: int = -1
    key_transform: KeyTransform | None = None
    logits: ops.LogitTerms | None = None
    windows: ops.WindowBatch | None = None
    raw: ops.RawRows | None = None

    def run(
        self,
        isa: str,
        num_threads: int = 1,
        forest: ops.PrefixForest | None = None,
        fast: bool = False,
    ) -> torch.Tensor:
        """Return the output `[num_tokens, num_heads, head_dim]`."""
        output = torch.full_like(self.query, torch.nan)
        ops.paged_attention(
            self.query,
            self.kv_cache,
            output,
            self.block_table,
            self.seq_lens,
            self.query_start_loc,
            self.fmt,
            self.scale,
            self.window,
            forest=forest,
            windows=self.windows,
            raw=self.raw,
            key_transform=self.key_transform,
            logits=self.logits,
            fast=fast,
            isa=isa,
            num_threads=num_threads,
        )
        return output

    def requests(self) -> list[tuple[int, int]]:
        """Return [(query tokens, sequence length), ...]."""
        return list(
            zip(
                self.query_start_loc.diff().tolist(),
                self.seq_lens.tolist(),
                strict=True,
            )
        )

    def forest(self) -> ops.PrefixForest:
        """Return what the requests share."""
        return ops.build_prefix_forest(
            self.block_table,
            self.seq_lens,
            self.query_start_loc,
            self.kv_cache.shape[2],
            self.query.shape[1] // self.kv_cache.shape[1],
            self.window,
        )

    def rows(self, request: int) -> slice:
        """Return the request's rows in `query`."""
        first, last = self.query_start_loc[request : request + 2].tolist()
        return slice(first, last)

    def select(self, requests: list[int]) -> "Batch":
        """Return the same requests in another order, or fewer of them."""
        assert self.windows is None
        lengths = [0] + [self.requests()[r][0] for r in requests]
        return replace(
            self,
            query=torch.cat([self.query[self.rows(r)] for r in requests]),
            block_table=self.block_table[requests].contiguous(),
            seq_lens=self.seq_lens[requests].contiguous(),
            query_start_loc=torch.tensor(lengths).cumsum(0).int(),
        )

    def chunk(self, request: int, begin: int, end: int) -> "Batch":
        """Return tokens `begin..end` of a request's queries as a batch of their own."""
        assert self.windows is None
        first, last = self.query_start_loc[request : request + 2].tolist()
        left = last - first - end
        return replace(
            self,
            query=self.query[first + begin : first + end],
            block_table=self.block_table[request : request + 1],
            seq_lens=self.seq_lens[request : request + 1] - left,
            query_start_loc=torch.tensor([0, end - begin], dtype=torch.int32),
        )


def make_batch(
    fmt: FormatSpec,
    requests: list[tuple[int, int]],
    *,
    head_dim: int = 64,
    kv_heads: int = 2,
    group: int = 2,
    block_size: int = 32,
    dtype: torch.dtype = torch.float32,
    window: int = -1,
    isa: str = FASTEST,
    key: torch.Tensor | None = None,
    value: torch.Tensor | None = None,
    key_transform: KeyTransform | None = None,
    logits: ops.LogitTerms | None = None,
) -> Batch:
    """Fill a cache with random sequences and ask for their last tokens.

    Args:
        fmt: The format.
        requests: (query tokens, sequence length) of each.
        head_dim: Elements per head.
        kv_heads: KV heads.
        group: Query heads per KV head.
        block_size: Tokens per block.
        dtype: Of keys, values and queries.
        window: Sliding window or -1.
        isa: Who stores.
        key: `[sum of lengths, kv_heads, head_dim]`; N(0, 1) if None.
        value: Like `key`.
        key_transform: Of the layer.
        logits: Soft cap, ALiBi slopes and sinks.

    """
    total = sum(length for _, length in requests)
    shape = (total, kv_heads, head_dim)
    key = torch.randn(shape).to(dtype) if key is None else key
    value = torch.randn(shape).to(dtype) if value is None else value
    counts = [-(-length // block_size) for _, length in requests]
    # Block 0 is nobody's; unused table entries point at it, and it holds garbage.
    order = (torch.randperm(sum(counts)) + 1).split(counts)
    table = torch.zeros(len(requests), max([*counts, 1]) + 1, dtype=torch.int32)
    slots = []
    for i, ((_, length), blocks) in enumerate(zip(requests, order, strict=True)):
        table[i, : len(blocks)] = blocks
        token = torch.arange(length)
        slots.append(blocks[token // block_size] * block_size + token % block_size)
    cache = new_cache(fmt, head_dim, block_size, sum(counts) + 1, kv_heads)
    slot_mapping = torch.cat(slots)
    ops.reshape_and_cache(
        key, value, cache, slot_mapping, fmt, key_transform=key_transform, isa=isa
    )
    lengths = torch.tensor([0] + [queries for queries, _ in requests])
    return Batch(
        torch.randn(int(lengths.sum()), kv_heads * group, head_dim).to(dtype),
        cache,
        table,
        torch.tensor([length for _, length in requests], dtype=torch.int32),
        lengths.cumsum(0).int(),
        fmt,
        head_dim**-0.5,
        window,
        key_transform,
        logits,
    )


def sequences(batch: Batch) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Dequantize: (keys, values) `[seq_len, kv_heads, head_dim]` fp64 per request.

    Keys come as they were stored, transformed.
    """
    head_dim, block_size = batch.query.shape[-1], batch.kv_cache.shape[2]
    out = []
    for table, (_, length) in zip(batch.block_table, batch.requests(), strict=True):
        keys, values = [], []
        for block in table[: -(-length // block_size)].tolist():
            tiles = [
                unpack_tile(tile.reshape(-1), head_dim, batch.fmt)
                for tile in batch.kv_cache[block]
            ]
            keys.append(torch.stack([dequantize_key(k) for k, _ in tiles], 1))
            pairs = [dequantize_value(v, batch.fmt) for _, v in tiles]
            values.append(torch.stack(pairs, 1))
        if keys:
            out.append(
                (torch.cat(keys)[:length].double(), torch.cat(values)[:length].double())
            )
        else:
            out.append((torch.empty(0), torch.empty(0)))
    return out


def oracle(
    batch: Batch,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    exact: Exact | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend in fp64 and bound what a kernel may differ by, output rounding left out.

    With weights p and output o, an error e_j of score j moves o by
    sum p_j e_j (v_j - o). Scores are natural (not base 2) here.

    1. A query row is rounded to 16 bits, unit = max|q| / 32639: D independent errors
       of variance unit^2/12 give e_j a standard deviation of
       scale * unit/sqrt(12) * |k_j|, independent between keys of random direction.
    2. exp2 is a polynomial with relative error 5e-6, and a score goes through four
       fp32 roundings: e_j <= 5e-6 + 4 * 2^-23 * scale * |q| |k|, all of one sign.
    3. Probabilities are rounded to 16 bits of the tile's largest p_j * scale_j: 128
       independent errors of variance unit^2/12 times a level, and level * scale is at
       most max|v_j| in root mean square, before and after rotating back.
    4. fp32 sums and log2(D) stages of the rotation: 24 eps of sum p_j |v_j|.

    Standard deviations (1 and 3) are taken six times. A soft cap only lessens 1, as
    no slope of tanh exceeds 1; tanh itself and the products around it have a relative
    error below 8 eps = 1e-6, of a logit of at most cap. An ALiBi bias is rounded twice,
    when it is made and when it is added: 2 eps of each logit's own bias. A sink joins
    the denominator as one more exact weight with exp2's error.

    With windows, 1 and 3 are of the cached tokens alone. A raw score is a chain of
    D / 16 fp32 products and sums and a tree of four; a raw weight goes through exp2
    when it is made, when its granule of 32 tokens folds, at each of the later ones and
    at the merge; its value joins 32 others and these folds.

    Returns:
        Output and tolerance, `[num_queries, num_heads, head_dim]` fp64.

    """
    (count, num_heads, _), length = query.shape, key.shape[0]
    group = num_heads // key.shape[1]
    position = torch.arange(length - count, length).unsqueeze(1)
    token = torch.arange(length).unsqueeze(0)
    hidden = token > position
    if batch.window > 0:
        hidden |= token <= position - batch.window
    terms = batch.logits or ops.LogitTerms()
    if exact is None:
        nothing = torch.zeros(count, length, dtype=torch.bool)
        exact = Exact(query, key, value, nothing)
    raw = exact.seen
    granules = int(raw.any(0).sum()) // 32 + 4 if raw.any() else 0
    outputs, bounds = [], []
    for head in range(num_heads):
        q, k, v = query[:, head], key[:, head // group], value[:, head // group]
        raw_q = exact.query[:, head]
        raw_k, raw_v = exact.key[:, head // group], exact.value[:, head // group]
        logit = torch.where(raw, raw_q @ raw_k.T, q @ k.T) * batch.scale
        extra = torch.zeros_like(logit)
        if terms.soft_cap > 0:
            logit = terms.soft_cap * torch.tanh(logit / terms.soft_cap)
            extra += 1e-6 * logit.abs()
        if terms.alibi_slopes is not None:
            bias = terms.alibi_slopes[head].double() * (token - position)
            logit = logit + bias
            extra += 2 * 2**-23 * bias.abs()
        logit = logit.masked_fill(hidden, -torch.inf)
        sink = torch.full((count, 1), -torch.inf).double()
        if terms.sinks is not None:
            sink = terms.sinks[head].double().expand(count, 1)
            extra += 2 * 2**-23 * sink.abs()
        p = torch.cat((logit, sink), 1).softmax(-1)[:, :length]
        whole, p, raw_p = p, p.masked_fill(raw, 0), p.masked_fill(~raw, 0)
        o = p @ v + raw_p @ raw_v
        longest = k.norm(dim=-1).max()
        sigma = batch.scale * longest / 32639 / 12**0.5 * q.abs().amax(-1, keepdim=True)
        spread2 = (p * p) @ (v * v) - 2 * (p * p) @ v * o
        spread2 += (p * p).sum(-1, keepdim=True) * o * o
        norm = q.norm(dim=-1, keepdim=True)
        systematic = 5e-6 + 4 * 2**-23 * batch.scale * longest * norm
        if granules:
            raw_norm = raw_q.norm(dim=-1, keepdim=True) * raw_k.norm(dim=-1).max()
            steps = query.shape[-1] / 16 + 8
            systematic += 5e-6 * (2 + granules)
            systematic += steps * 2**-24 * batch.scale * raw_norm
        deviation = p @ v.abs() + raw_p @ raw_v.abs() + o.abs()
        tiles = (p * v.abs().amax(-1)).split(128, -1)
        largest2 = sum(tile.amax(-1, keepdim=True) ** 2 for tile in tiles)
        probability = (128 / 12 * largest2).sqrt() / 65535
        rounding = 24 * 2**-24 * (p @ v.norm(dim=-1, keepdim=True))
        rounding = rounding + (32 + 3 * granules) * 2**-24 * (raw_p @ raw_v.abs())
        outputs.append(o)
        bounds.append(
            6 * (sigma * spread2.clamp(min=0).sqrt() + probability)
            + systematic * deviation
            + (p * extra) @ v.abs()
            + (raw_p * extra) @ raw_v.abs()
            + (whole * extra).sum(-1, keepdim=True) * o.abs()
            + rounding
        )
    return torch.stack(outputs, 1), torch.stack(bounds, 1)


# Half the distance between neighbours, relative to the smaller of their magnitudes.
_HALF_ULP = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 2**-24}


def worst_ratio(batch: Batch, output: torch.Tensor) -> float:
    """Return max |output - oracle| / tolerance over the batch; at most 1 is right."""
    worst, windows = 0.0, None
    if batch.windows is not None:
        assert batch.raw is not None
        transform = batch.key_transform or KeyTransform()
        windows = request_windows(
            batch.query_start_loc, batch.windows, batch.raw, transform.centers
        )
    for request, (key, value) in enumerate(sequences(batch)):
        rows = batch.rows(request)
        if rows.start == rows.stop:
            continue
        query = batch.query[rows]
        if batch.key_transform is not None:
            query = batch.key_transform.queries(query)
        exact = None
        if windows is not None:
            raw = windows[request].rows(len(key), batch.window)
            # What no query sees is NaN there.
            key_rows, value_rows = (rows.double().nan_to_num() for rows in raw[:2])
            exact = Exact(batch.query[rows].double(), key_rows, value_rows, raw[2])
        expected, bound = oracle(batch, query.double(), key, value, exact)
        # fp16 also has subnormals, 2^-24 apart.
        bound += _HALF_ULP[output.dtype] * expected.abs() + 2**-25 * (
            output.dtype == torch.float16
        )
        error = (output[rows].double() - expected).abs()
        if not bool(error.isfinite().all()):
            return math.inf
        worst = max(worst, (error / bound).max().item())
    return worst

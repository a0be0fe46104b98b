# SPDX-License-Identifier: Apache-2.0
"""Checks every Triton kernel against the reference on a GPU, then times them.

    python -m benchmarks.gpu [--output results.json]     on a CUDA GPU, under 5 minutes
    TRITON_INTERPRET=1 python -m benchmarks.gpu --interpret      the checks, on a CPU

Needs torch, Triton and this package; no vLLM, and no compiled C++ kernels.
"""

import argparse
import json
import os
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl

from polykv_vllm.formats import FORMATS, FormatSpec, TileLayout
from polykv_vllm.formats.gpu_layout import GpuTileLayout, byte_permutation
from polykv_vllm.kernels.triton import launch
from polykv_vllm.kernels.triton.interpret import speed_up_interpreter
from polykv_vllm.kernels.triton.plan import AttentionPlan, build_plan, plan_bounds
from polykv_vllm.keys import KeyTransform
from polykv_vllm.reference import attention, cache

BLOCK = 128
SHAPES = ((32, 8, 128), (64, 8, 128))
AGENTS = (1, 4, 15, 64, 256)
PREFIXES = (2048, 8192, 32768)
OWN_TOKENS = 64


# A bf16 paged attention without sharing, to compare with: two plain kernels.
@triton.jit
def _bf16_split(
    query, kv, table, lens, part, stats, scale, width, splits,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, SPLIT: tl.constexpr,
    PAGE: tl.constexpr,
):  # fmt: skip
    request, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(lens + request)
    if split * SPLIT >= length:
        return
    r, d = tl.arange(0, 16), tl.arange(0, D)
    kv_heads: tl.constexpr = HEADS // GROUP
    row = request * HEADS + head * GROUP + r
    valid = r < GROUP
    q = tl.load(query + row[:, None] * D + d[None, :], mask=valid[:, None], other=0.0)
    peak = tl.full((16,), float("-inf"), tl.float32)
    total = tl.zeros((16,), tl.float32)
    acc = tl.zeros((16, D), tl.float32)
    for begin in range(split * SPLIT, tl.minimum((split + 1) * SPLIT, length), 64):
        token = begin + tl.arange(0, 64)
        seen = token < length
        block = tl.load(table + request * width + token // PAGE, mask=seen, other=0)
        at = ((block.to(tl.int64) * kv_heads + head) * PAGE + token % PAGE) * (2 * D)
        k = tl.load(kv + at[:, None] + d[None, :])
        s = tl.where(seen[None, :], tl.dot(q, tl.trans(k)) * scale, float("-inf"))
        top = tl.maximum(peak, tl.max(s, axis=1))
        p = tl.exp2(s - top[:, None])
        old = tl.exp2(peak - top)
        v = tl.load(kv + at[:, None] + D + d[None, :])
        acc = acc * old[:, None] + tl.dot(p.to(tl.bfloat16), v)
        total = total * old + tl.sum(p, axis=1)
        peak = top
    place = row * splits + split
    tl.store(part + place[:, None] * D + d[None, :], acc, mask=valid[:, None])
    tl.store(stats + 2 * place, peak, mask=valid)
    tl.store(stats + 2 * place + 1, total, mask=valid)


@triton.jit
def _bf16_merge(
    output, lens, part, stats, splits,
    HEADS: tl.constexpr, D: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    row, d = tl.program_id(0), tl.arange(0, D)
    count = (tl.load(lens + row // HEADS) + SPLIT - 1) // SPLIT
    peak, total = float("-inf"), 0.0
    acc = tl.zeros((D,), tl.float32)
    for split in range(0, count):
        place = row * splits + split
        part_peak, part_total = (
            tl.load(stats + 2 * place),
            tl.load(stats + 2 * place + 1),
        )
        top = tl.maximum(peak, part_peak)
        old, fresh = tl.exp2(peak - top), tl.exp2(part_peak - top)
        acc = acc * old + tl.load(part + place * D + d) * fresh
        total = total * old + part_total * fresh
        peak = top
    tl.store(output + row * D + d, (acc / total).to(tl.bfloat16))


class Bf16Paged:
    """The two kernels above with their scratch memory; a query token per request."""

    def __init__(self, query: torch.Tensor, table: torch.Tensor, lens: torch.Tensor):
        self.query, self.table, self.lens = query, table, lens
        agents, heads, dim = query.shape
        self.splits = -(-int(lens.max()) // 512)
        rows = agents * heads * self.splits
        self.part = torch.empty(rows, dim, device=query.device)
        self.stats = torch.empty(rows, 2, device=query.device)
        self.output = torch.empty_like(query)

    def __call__(self, kv: torch.Tensor) -> torch.Tensor:
        """Attend over `kv` `[blocks, kv_heads, block_size, 2 * D]` bf16."""
        agents, heads, dim = self.query.shape
        group = heads // kv.shape[1]
        scale = dim**-0.5 * 1.44269504
        _bf16_split[(agents, kv.shape[1], self.splits)](
            self.query, kv, self.table, self.lens, self.part, self.stats, scale,
            self.table.shape[1], self.splits, heads, group, dim, 512, BLOCK,
        )  # fmt: skip
        _bf16_merge[(agents * heads,)](
            self.output, self.lens, self.part, self.stats, self.splits, heads, dim, 512
        )
        return self.output


def reorder(tiles: torch.Tensor, fmt: FormatSpec, head_dim: int) -> torch.Tensor:
    """Return a cache in the CPU's order in the GPU's."""
    shape = (fmt, head_dim, tiles.shape[2])
    order = byte_permutation(TileLayout(*shape), GpuTileLayout(*shape))
    flat = tiles.reshape(*tiles.shape[:2], -1)[..., order]
    return flat.reshape(tiles.shape).contiguous()


def make_plan(
    table: torch.Tensor,
    lens: list[int],
    queries: list[int],
    group: int,
    device: str,
    *,
    shared: bool,
) -> AttentionPlan:
    """Return a plan on the device; `shared` looks for common prefixes."""
    starts = torch.tensor([0, *queries]).cumsum(0).int()
    seq_lens = torch.tensor(lens).int()
    return build_plan(
        table.to(device), seq_lens.to(device), starts.to(device), group, BLOCK,
        bounds=plan_bounds(seq_lens, starts, group, -1), share=shared,
    )  # fmt: skip


def check_format(fmt: FormatSpec, head_dim: int, device: str) -> dict[str, Any]:
    """Compare store and attention with the reference, in bits and in error."""
    torch.manual_seed(0)
    heads, group, blocks = 2, 4, 7
    transform = KeyTransform(torch.rand(heads, head_dim) + 0.5, True)
    tokens = (blocks - 1) * BLOCK
    key, value = torch.randn(2, tokens, heads, head_dim)
    slots = torch.arange(BLOCK, blocks * BLOCK)
    shape = (blocks, heads, BLOCK, fmt.slot_bytes(head_dim))
    want = torch.full(shape, 0xFF, dtype=torch.uint8)
    got = want.clone().to(device)
    cache.reshape_and_cache(transform.keys(key), value, want, slots, fmt)
    store = launch.LayerStore(fmt, 0, transform)
    store(key.to(device), value.to(device), got, slots.to(device))
    out: dict[str, Any] = {"format": fmt.name, "head_dim": head_dim}
    out["store_equal"] = torch.equal(reorder(want, fmt, head_dim), got.cpu())

    # Two decodes that share five blocks, two drafts, and a prefill over a block.
    table = torch.tensor([[1, 2, 3, 4, 5, 6]] * 3 + [[6, 5, 0, 0, 0, 0]]).int()
    lens, queries = [700, 690, 650, 160], [1, 1, 2, 20]
    query = torch.randn(sum(queries), heads * group, head_dim)
    layer = launch.LayerAttention(fmt, head_dim**-0.5, -1, False, 0, transform)
    results = []
    for shared in (False, True):
        plan = make_plan(table, lens, queries, group, device, shared=shared)
        output = torch.full_like(query, torch.nan).to(device)
        layer.run(query.to(device), got, output, plan)
        results.append(output.cpu())
    expected = torch.empty_like(query)
    starts = torch.tensor([0, *queries]).cumsum(0).int()
    attention.paged_attention(
        transform.queries(query), want, expected, table, torch.tensor(lens), starts,
        fmt, head_dim**-0.5,
    )  # fmt: skip
    error = (results[0] - expected).norm() / expected.norm()
    out["attention_error"] = float(error)
    out["sharing_equal"] = torch.equal(results[0], results[1])
    out["assembly_equal"] = _plain_equals(layer, query, got, plan, results[1], device)
    out["ok"] = bool(
        out["store_equal"] and out["sharing_equal"] and error <= 1e-3
        and out["assembly_equal"] is not False
    )  # fmt: skip
    return out


def _plain_equals(
    layer: launch.LayerAttention, query: torch.Tensor, kv_cache: torch.Tensor,
    plan: AttentionPlan, expected: torch.Tensor, device: str,
) -> bool | None:  # fmt: skip
    """Return whether inline PTX and plain Triton agree; None in the interpreter."""
    if device == "cpu":
        return None
    kept, launch.assembly_of = launch.assembly_of, lambda tile: launch.PLAIN
    try:
        output = torch.empty_like(query).to(device)
        layer.run(query.to(device), kv_cache, output, plan)
    finally:
        launch.assembly_of = kept
    return torch.equal(output.cpu(), expected)


def median_ms(run: Callable[[], Any]) -> float:
    """Return the median time of one call on the GPU, caches of L2 flushed."""
    for _ in range(3):
        run()
    flush = torch.empty(256 << 20, dtype=torch.int8, device="cuda")
    times = []
    for _ in range(15):
        flush.zero_()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)


def copy_bandwidth() -> float:
    """Return bytes per second of a large copy, reads and writes counted."""
    source = torch.empty(1 << 30, dtype=torch.int8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() / (median_ms(lambda: target.copy_(source)) * 1e-3)


def time_decode(
    fmt: FormatSpec, shape: tuple[int, int, int], agents: int, prefix: int, peak: float
) -> dict[str, Any]:
    """Time a decode step of agents that share a prefix, four ways."""
    heads, kv_heads, dim = shape
    shared_blocks = prefix // BLOCK
    table = torch.arange(shared_blocks + 1).repeat(agents, 1).int() + 1
    table[:, -1] = torch.arange(agents) + shared_blocks + 1
    blocks = shared_blocks + agents + 1
    lens = [prefix + OWN_TOKENS] * agents
    query = torch.randn(agents, heads, dim, device="cuda", dtype=torch.bfloat16)
    packed = torch.randint(
        0, 256, (blocks, kv_heads, BLOCK, fmt.slot_bytes(dim)),
        dtype=torch.uint8, device="cuda",
    )  # fmt: skip
    packed.view(blocks, kv_heads, -1)[..., -4 * BLOCK :] = 60  # scales near 0.01
    layer = launch.LayerAttention(fmt, dim**-0.5, -1, False, 0, None)
    output = torch.empty_like(query)
    row: dict[str, Any] = {"shape": shape, "agents": agents, "prefix": prefix}
    for name, shared in (("apart_ms", False), ("shared_ms", True)):
        plan = make_plan(
            table, lens, [1] * agents, heads // kv_heads, "cuda", shared=shared
        )
        row[name] = median_ms(lambda plan=plan: layer.run(query, packed, output, plan))
    kv = torch.randn(blocks, kv_heads, BLOCK, 2 * dim, device="cuda").bfloat16()
    paged = Bf16Paged(query, table.cuda(), torch.tensor(lens).int().cuda())
    row["bf16_paged_ms"] = median_ms(lambda: paged(kv))
    k, v = torch.randn(2, 1, kv_heads, lens[0], dim, device="cuda").bfloat16()
    k, v = (x.expand(agents, -1, -1, -1) for x in (k, v))
    q = query.unsqueeze(2)
    sdpa = torch.nn.functional.scaled_dot_product_attention
    row["sdpa_ms"] = median_ms(lambda: sdpa(q, k, v, enable_gqa=True))
    row["bytes_apart"] = agents * lens[0] * kv_heads * fmt.slot_bytes(dim)
    tokens = prefix + agents * OWN_TOKENS
    row["bytes_shared"] = tokens * kv_heads * fmt.slot_bytes(dim)
    for way in ("apart", "shared"):
        rate = row[f"bytes_{way}"] / (row[f"{way}_ms"] * 1e-3)
        row[f"bandwidth_share_{way}"] = rate / peak
    return row


def time_store(fmt: FormatSpec, tokens: int, peak: float) -> dict[str, Any]:
    """Time one layer's store."""
    kv_heads, dim = 8, 128
    blocks = -(-tokens // BLOCK) + 1
    shape = (blocks, kv_heads, BLOCK, fmt.slot_bytes(dim))
    packed = torch.empty(shape, dtype=torch.uint8, device="cuda")
    key, value = torch.randn(2, tokens, kv_heads, dim, device="cuda").bfloat16()
    slots = torch.arange(tokens, device="cuda")
    store = launch.LayerStore(fmt, 0, KeyTransform(rotate=True))
    time = median_ms(lambda: store(key, value, packed, slots))
    moved = tokens * kv_heads * (4 * dim + fmt.slot_bytes(dim))
    share = moved / (time * 1e-3) / peak
    return {"tokens": tokens, "ms": time, "bytes": moved, "bandwidth_share": share}


def time_prefill(fmt: FormatSpec, queries: int, context: int) -> dict[str, Any]:
    """Time a chunk of a prompt over a cached prefix, beside SDPA with a mask."""
    heads, kv_heads, dim = SHAPES[0]
    length = queries + context
    blocks = length // BLOCK
    shape = (blocks + 1, kv_heads, BLOCK, fmt.slot_bytes(dim))
    packed = torch.zeros(shape, dtype=torch.uint8, device="cuda")
    query = torch.randn(queries, heads, dim, device="cuda").bfloat16()
    table = torch.arange(blocks).unsqueeze(0).int() + 1
    plan = make_plan(
        table, [length], [queries], heads // kv_heads, "cuda", shared=False
    )
    layer = launch.LayerAttention(fmt, dim**-0.5, -1, False, 0, None)
    output = torch.empty_like(query)
    time = median_ms(lambda: layer.run(query, packed, output, plan))
    k, v = torch.randn(2, 1, kv_heads, length, dim, device="cuda").bfloat16()
    q = query.transpose(0, 1).unsqueeze(0)
    mask = torch.ones(queries, length, dtype=torch.bool, device="cuda").tril(context)
    sdpa = torch.nn.functional.scaled_dot_product_attention
    stock = median_ms(lambda: sdpa(q, k, v, attn_mask=mask, enable_gqa=True))
    return {"queries": queries, "context": context, "ms": time, "sdpa_ms": stock}


def show(name: str, rows: list[dict[str, Any]]) -> None:
    """Print rows as a table."""
    print(f"\n{name}")
    if not rows:
        return
    print("  " + "  ".join(f"{key:>16}" for key in rows[0]))
    for row in rows:
        cells = (f"{x:.4g}" if isinstance(x, float) else str(x) for x in row.values())
        print("  " + "  ".join(f"{cell:>16}" for cell in cells), flush=True)


def main() -> None:
    """Check, time, write; exit with 1 if a check fails."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--interpret", action="store_true", help="checks only, on a CPU"
    )
    parser.add_argument("--format", choices=FORMATS, default="polykv_k8v3")
    parser.add_argument("--output", type=Path, help="write the results as JSON")
    options = parser.parse_args()
    if options.interpret and os.environ.get("TRITON_INTERPRET") != "1":
        sys.exit("--interpret needs TRITON_INTERPRET=1 in the environment")
    if not options.interpret and not torch.cuda.is_available():
        sys.exit("no CUDA GPU is available; --interpret runs the checks on a CPU")
    if options.interpret:
        speed_up_interpreter()
    device = "cpu" if options.interpret else "cuda"
    dims = (64,) if options.interpret else (64, 128, 256)
    results: dict[str, Any] = {"torch": torch.__version__, "triton": triton.__version__}
    results["device"] = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    results["checks"] = [
        check_format(f, d, device) for f in FORMATS.values() for d in dims
    ]
    show("checks", results["checks"])
    if device == "cuda":
        fmt = FORMATS[options.format]
        peak = results["copy_bytes_per_s"] = copy_bandwidth()
        results["decode"] = [
            time_decode(fmt, shape, agents, prefix, peak)
            for shape in SHAPES for prefix in PREFIXES for agents in AGENTS
        ]  # fmt: skip
        results["store"] = [time_store(fmt, n, peak) for n in (1, 64, 1024, 8192)]
        results["prefill"] = [
            time_prefill(fmt, 1024, context) for context in (0, 2048, 8192)
        ]
        for name in ("decode", "store", "prefill"):
            show(name, results[name])
    if options.output:
        options.output.write_text(json.dumps(results, indent=1) + "\n")
    if not all(check["ok"] for check in results["checks"]):
        sys.exit("a check failed")


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
"""What does storing cost: rotate, quantize, pack and scatter a chunk of a prompt?

    python -m benchmarks.store

Time of `reshape_and_cache` per layer, beside vLLM's, which only copies. Its share of an
engine's prefill is in the output of `python -m benchmarks.engine`.
"""

from typing import Any

import torch
import typer
from rich.table import Table

from benchmarks import _environment, _report
from benchmarks import _options as options
from benchmarks._cases import BLOCK_SIZE, Case, Shape, make_batch
from benchmarks._kernels import PolykvKernel, VllmKernel, vllm_paths
from benchmarks._timing import Timing, alternate
from benchmarks.attention import our_isas
from polykv_vllm.formats import FormatSpec
from polykv_vllm.reference.cache import reshape_and_cache

CHUNK_TOKENS = 2048
_ROUNDS = 31


def is_exact(arm: PolykvKernel) -> bool:
    """Whether the last block of the cache has the reference's bytes."""
    batch = arm.batch
    expected = torch.zeros_like(arm.copies[0][-1:])
    rows = slice(-BLOCK_SIZE, None)
    slots = torch.arange(BLOCK_SIZE)
    reshape_and_cache(batch.key[rows], batch.value[rows], expected, slots, arm.fmt)
    return torch.equal(arm.copies[0][-1:], expected)


def measure(
    shape: Shape, fmt: FormatSpec, isas: list[str], tokens: int, threads: int
) -> tuple[dict[str, Timing], list[str]]:
    """Check and time the store of one layer.

    Args:
        shape: Heads.
        fmt: Our format.
        isas: Our instruction sets.
        tokens: Tokens of the chunk, a multiple of the block size.
        threads: Compute threads.

    Returns:
        Timings by arm, empty when a check failed, and the arms that failed.

    """
    batch = make_batch(Case(shape, tokens))
    ours = {f"polykv {isa}": PolykvKernel(batch, fmt, isa, threads) for isa in isas}
    wrong = [name for name, arm in ours.items() if not is_exact(arm)]
    if wrong:
        return {}, wrong
    arms: dict[str, PolykvKernel | VllmKernel] = {**ours}
    for path, name in vllm_paths().items():
        arms[f"vLLM {name}"] = VllmKernel(batch, path)
    calls = {name: _ignore_round(arm) for name, arm in arms.items()}
    return alternate(calls, _ROUNDS, warmup=2), []


def _ignore_round(arm: PolykvKernel | VllmKernel) -> Any:
    return lambda _round_number: arm.store()


def main(
    format_name: options.Format = "polykv",
    shape: options.Shapes = None,
    threads: options.Threads = 1,
    quick: options.Quick = False,
    json: options.Json = None,
) -> None:
    """Storing a chunk of 2,048 tokens, one layer."""
    torch.set_num_threads(threads)
    fmt, shapes = options.read_options(format_name, shape or options.SHAPES)
    tokens = BLOCK_SIZE if quick else CHUNK_TOKENS
    environment = _environment.describe(threads)
    _report.print_headline(environment)
    table = Table(title=f"{fmt.name}: one layer stores {tokens} tokens")
    for column in ("heads/KV heads/head size", "kernel"):
        table.add_column(column)
    for column in ("ms (p10-p90)", "ns per (token, KV head)"):
        table.add_column(column, justify="right")
    records, failed = {}, False
    for each in shapes:
        timings, wrong = measure(each, fmt, our_isas(), tokens, threads)
        for name in wrong:
            table.add_row(str(each), name, "[red]bytes differ from the reference[/]")
        failed = failed or bool(wrong)
        for name, timing in timings.items():
            per_row = timing.median_s / tokens / each.num_kv_heads * 1e9
            table.add_row(str(each), name, _report.spread(timing), f"{per_row:.0f}")
        table.add_section()
        records[str(each)] = {name: t.as_dict() for name, t in timings.items()}
    _report.console.print(table)
    record = {"benchmark": "store", "environment": environment, "format": fmt.name}
    _report.write_json(json, {**record, "tokens": tokens, "timings": records})
    if failed:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)

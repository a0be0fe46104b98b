# SPDX-License-Identifier: Apache-2.0
"""What finding the prefix forest of a batch costs, once per step.

    python -m benchmarks.forest

64 requests of 512 blocks, the batch that the project's requirement names, whose
share of a step must stay below 1 %. The step is the shortest one such a batch can
have here: attention of one layer over it, times the layers of SmolLM2-135M.
"""

import time
from collections.abc import Callable

import torch
import typer
from rich.table import Table

from benchmarks import _environment, _report
from benchmarks import _options as options
from benchmarks._timing import Timing, alternate
from polykv_vllm import ops
from polykv_vllm.formats import get_format

ROWS, BLOCKS, BLOCK_SIZE = 64, 512, 128
HEADS, KV_HEADS, HEAD_DIM, LAYERS = 9, 3, 64, 30
MAX_SHARE = 0.01
SHARED_BLOCKS = {"one prefix": [511], "nested": [64, 256, 480], "nothing": []}
"""Of each batch: where prefixes end; each level halves the groups of requests."""


def make_table(levels: list[int]) -> torch.Tensor:
    """Return `[ROWS, BLOCKS]` int32; behind level i, 2^i groups go on apart."""
    table = torch.arange(ROWS * BLOCKS, dtype=torch.int32).view(ROWS, BLOCKS) + 1
    start = 0
    for i, end in enumerate(levels):
        size = ROWS >> i
        for first in range(0, ROWS, size):
            table[first : first + size, start:end] = table[first, start:end].clone()
        start = end
    return table


def _forest_of(table: torch.Tensor) -> Callable[[], ops.PrefixForest]:
    seq_lens = torch.full((ROWS,), BLOCKS * BLOCK_SIZE, dtype=torch.int32)
    starts = torch.arange(ROWS + 1, dtype=torch.int32)
    group = HEADS // KV_HEADS
    return lambda: ops.build_prefix_forest(table, seq_lens, starts, BLOCK_SIZE, group)


def attention_s(table: torch.Tensor) -> float:
    """Time one layer's attention over the batch, all requests sharing its blocks.

    Every block number stands for the same few blocks: 2 GiB of them would only make
    the step longer, and the share of the forest smaller.
    """
    fmt = get_format("polykv")
    few = 64
    cache = torch.zeros(
        few, KV_HEADS, BLOCK_SIZE, fmt.slot_bytes(HEAD_DIM), dtype=torch.uint8
    )
    query = torch.randn(ROWS, HEADS, HEAD_DIM).bfloat16()
    forest = _forest_of(table)()
    small = table % few
    layer = ops.layer_attention(fmt, HEAD_DIM**-0.5, num_threads=1)
    batch = ops.AttentionBatch(
        small,
        torch.full((ROWS,), BLOCKS * BLOCK_SIZE, dtype=torch.int32),
        torch.arange(ROWS + 1, dtype=torch.int32),
        forest,
    )
    start = time.perf_counter()
    layer(query, cache, torch.empty_like(query), batch)
    return time.perf_counter() - start


def main(repeats: int = 200, json: options.Json = None) -> None:
    """Cost of the prefix forest at 64 requests of 512 blocks."""
    torch.set_num_threads(1)
    environment = _environment.describe(1)
    _report.print_headline(environment)
    tables = {name: make_table(levels) for name, levels in SHARED_BLOCKS.items()}
    builders = {name: _forest_of(table) for name, table in tables.items()}
    arms = {name: (lambda _, build=build: build()) for name, build in builders.items()}
    timings: dict[str, Timing] = alternate(arms, repeats)
    step_s = LAYERS * attention_s(tables["one prefix"])
    table = Table(title=f"{ROWS} requests of {BLOCKS} blocks", title_justify="left")
    for name in ("batch", "segments", "ms (p10-p90)", "share of a step"):
        table.add_column(name, justify="left" if name == "batch" else "right")
    for name, timing in timings.items():
        share = _report.share(timing.median_s / step_s, MAX_SHARE)
        segments = str(len(builders[name]()))
        table.add_row(name, segments, _report.spread(timing), share)
    _report.console.print(table)
    _report.console.print(
        f"step: {_report.milliseconds(step_s)} ms, attention over one shared prefix "
        f"alone, {LAYERS} layers; the linear layers come on top"
    )
    record = {
        "benchmark": "forest",
        "environment": environment,
        "step_s": step_s,
        "timings": {name: timing.as_dict() for name, timing in timings.items()},
    }
    _report.write_json(json, record)


if __name__ == "__main__":
    typer.run(main)

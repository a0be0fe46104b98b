# SPDX-License-Identifier: Apache-2.0
"""What full-precision windows add to attention from the compressed cache.

    python -m benchmarks.windows --windows 4/128 --windows 64/256

Each case without windows and with each of them, in one process. The yardstick of the
added time is a layer that attends to the last 2 W cached tokens and to nothing else.
"""

import math
from collections.abc import Callable
from typing import Annotated, Any

import torch
import typer
from rich.table import Table

from benchmarks import _environment, _report
from benchmarks import _options as options
from benchmarks._cases import BLOCK_SIZE, Batch, Case, Shape, make_batch
from benchmarks._kernels import relative_error
from benchmarks._timing import Timing, alternate, cold_footprint_bytes, copies_for
from polykv_vllm import ops
from polykv_vllm.formats import FormatSpec

MAX_ERROR = 3e-3
"""Bound on ||out - ref|| / ||ref||, ref being fp32 over both tiers."""
WINDOWS = ("4/128", "64/256")
OWN_TOKENS = 64
_PAGE = ops.WINDOW_PAGE_TOKENS
_ROUNDS = 21

WindowOption = Annotated[
    list[str] | None,
    typer.Option("--windows", help="sink tokens/recent tokens; repeatable"),
]


def parse_windows(text: str) -> tuple[int, int]:
    """Read `sinks/recent`.

    Raises:
        typer.BadParameter: It is not of that form.

    """
    parts = text.split("/")
    if len(parts) != 2 or not all(part.isdecimal() for part in parts):
        raise typer.BadParameter(f"windows {text!r} are not SINKS/RECENT")
    return int(parts[0]), int(parts[1])


def cases_of(shape: Shape, quick: bool) -> list[Case]:
    """Return decode alone and for many agents, a prompt, and a chunk behind one."""
    if quick:
        return [Case(shape, 300), Case(shape, 300, agents=3), Case(shape, 200, 70)]
    return [
        Case(shape, 3072),
        Case(shape, 3072 + OWN_TOKENS, agents=15),
        Case(shape, 3072 + OWN_TOKENS, agents=64),
        Case(shape, 2048, 2048),
        Case(shape, 4096, 2048),
    ]


def make_windows(
    batch: Batch, sink_tokens: int, recent_tokens: int
) -> tuple[ops.WindowBatch, ops.RawRows]:
    """Draw raw copies; what is shared has pages of its own for every sequence."""
    agents = batch.seq_lens.shape[0]
    context = batch.seq_lens - batch.query_start_loc.diff()
    begin = (context + 1 - max(1, recent_tokens)).clamp(min=0).int()
    sinks = -(-sink_tokens // _PAGE)
    recent = -(-recent_tokens // _PAGE) + 1
    pages = torch.arange(agents * (sinks + recent), dtype=torch.int32)
    pages = pages.view(agents, sinks + recent)
    windows = ops.WindowBatch(
        recent_tokens,
        torch.full((agents,), sink_tokens, dtype=torch.int32),
        begin,
        pages[:, :sinks],
        pages[:, sinks:],
    )
    kv_heads, head_dim = batch.key.shape[1:]
    rows = torch.randn(2, batch.query.shape[0], kv_heads, head_dim).bfloat16()
    cache = torch.randn(pages.numel(), 2, kv_heads, _PAGE, head_dim).bfloat16()
    return windows, ops.RawRows(rows[0], rows[1], cache)


class WindowKernel:
    """One arm: attention with some windows, or none, or of a sliding window."""

    def __init__(
        self,
        batch: Batch,
        fmt: FormatSpec,
        isa: str,
        threads: int,
        windows: tuple[int, int] | None = None,
        sliding_window: int = -1,
    ) -> None:
        self.query, self.output = batch.query, torch.empty_like(batch.query)
        kv_heads, head_dim = batch.key.shape[1:]
        shape = (batch.num_blocks, kv_heads, BLOCK_SIZE, fmt.slot_bytes(head_dim))
        cache = torch.zeros(shape, dtype=torch.uint8)
        ops.reshape_and_cache(batch.key, batch.value, cache, batch.slots, fmt, isa=isa)
        self.copies = cache.unsqueeze(0)
        tables = (batch.block_table, batch.seq_lens, batch.query_start_loc)
        group = batch.query.shape[1] // kv_heads
        forest = ops.build_prefix_forest(*tables, BLOCK_SIZE, group, sliding_window)
        made = (None, None) if windows is None else make_windows(batch, *windows)
        self.raw = made[1]
        self._batch = ops.AttentionBatch(*tables, forest, made[0])

        def layer(isa: str) -> Any:
            return ops.layer_attention(
                fmt, batch.scale, sliding_window, isa=isa, num_threads=threads
            )

        self._layer, self._reference = layer(isa), layer("reference")

    def __call__(self, round_number: int) -> None:
        """Run once."""
        copy = self.copies[round_number % len(self.copies)]
        self._layer(self.query, copy, self.output, self._batch, self.raw)

    def error(self) -> float:
        """Return the result's distance from the oracle's, relative."""
        self.output.fill_(math.nan)
        self(0)
        expected = torch.empty_like(self.output)
        self._reference(self.query, self.copies[0], expected, self._batch, self.raw)
        return relative_error(self.output, expected.float())


def arms_of(
    case: Case,
    fmt: FormatSpec,
    isa: str,
    threads: int,
    windows: list[tuple[int, int]],
) -> dict[str, WindowKernel]:
    """Return without windows, with each, and the yardstick of each."""
    batch = make_batch(case)
    arms = {"none": WindowKernel(batch, fmt, isa, threads)}
    for sinks, recent in windows:
        name = f"{sinks}/{recent}"
        arms[name] = WindowKernel(batch, fmt, isa, threads, (sinks, recent))
        if recent:
            arms[f"{name} yardstick"] = WindowKernel(
                batch, fmt, isa, threads, sliding_window=2 * recent
            )
    return arms


def measure(
    arms: dict[str, WindowKernel], footprint_bytes: int, clock: Callable[[], float]
) -> tuple[dict[str, float], dict[str, Timing]]:
    """Return errors and, unless one exceeds the bound, timings."""
    errors = {name: arm.error() for name, arm in arms.items()}
    if not all(error <= MAX_ERROR for error in errors.values()):
        return errors, {}
    read = sum(arm.copies[0].nbytes for arm in arms.values())
    for arm in arms.values():
        arm.copies = arm.copies.repeat(copies_for(footprint_bytes, read), 1, 1, 1, 1)
    return errors, alternate(arms, _ROUNDS, clock=clock)


def make_table(title: str) -> Table:
    """Return the table of one shape without rows."""
    table = Table(title=title, title_justify="left")
    for name in ("case", "windows", "error", "ms (p10-p90)"):
        table.add_column(name, no_wrap=True)
    for name in ("of none", "2 W cached ms", "added, of 2 W cached"):
        table.add_column(name, justify="right")
    return table


def as_record(
    case: Case, errors: dict[str, float], timings: dict[str, Timing]
) -> dict[str, Any]:
    """Return a case's results for the JSON report."""
    return {
        "shape": str(case.shape),
        "context": case.context,
        "query_len": case.query_len,
        "agents": case.agents,
        "errors": errors,
        "timings": {name: timing.as_dict() for name, timing in timings.items()},
    }


def add_rows(
    table: Table, case: Case, errors: dict[str, float], timings: dict[str, Timing]
) -> None:
    """Add a case's rows to the table."""
    label = f"{case.agents} agents: {case}" if case.agents > 1 else f"{case}"
    for name in (each for each in errors if not each.endswith("yardstick")):
        cells = [label, name, f"{errors[name]:.1e}"]
        if not timings:
            table.add_row(*cells, "[red]refcheck failed[/]")
            continue
        cells.append(_report.spread(timings[name]))
        added_s = timings[name].median_s - timings["none"].median_s
        yardstick = timings.get(f"{name} yardstick")
        if name != "none":
            cells.append(
                _report.ratio(timings[name].median_s / timings["none"].median_s)
            )
        if yardstick is not None:
            cells.append(_report.milliseconds(yardstick.median_s))
            cells.append(_report.ratio(added_s / yardstick.median_s))
        table.add_row(*cells)
    table.add_section()


def main(
    format_name: options.Format = "polykv",
    shape: options.Shapes = None,
    windows: WindowOption = None,
    isa: str | None = None,
    threads: options.Threads = 1,
    footprint_mib: options.Footprint = None,
    cpu_time: options.CpuTime = False,
    quick: options.Quick = False,
    json: options.Json = None,
) -> None:
    """Attention with full-precision windows beside attention without."""
    clock = options.read_clock(cpu_time, threads)
    fmt, shapes = options.read_options(format_name, shape or options.SHAPES)
    parsed = [parse_windows(text) for text in windows or WINDOWS]
    isa = isa or ops.current_isa()
    if footprint_mib is None:
        footprint_mib = 0 if quick else cold_footprint_bytes() >> 20
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    environment = _environment.describe(threads)
    _report.print_headline(environment)
    results: list[dict[str, Any]] = []
    for each in shapes:
        title = f"{fmt.name}, {isa}, heads/KV heads/head size {each}; {clock.__name__}"
        table = make_table(title)
        for case in cases_of(each, quick):
            arms = arms_of(case, fmt, isa, threads, parsed)
            errors, timings = measure(arms, footprint_mib << 20, clock)
            add_rows(table, case, errors, timings)
            results.append(as_record(case, errors, timings))
        _report.console.print(table)
    _report.write_json(
        json,
        {
            "benchmark": "windows",
            "environment": environment,
            "format": fmt.name,
            "isa": isa,
            "results": results,
        },
    )
    if not all(result["timings"] for result in results):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)

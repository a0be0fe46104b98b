# SPDX-License-Identifier: Apache-2.0
"""What does a key treatment cost, when storing and in attention?

    python -m benchmarks.keys

The treatments take turns; each is given as the time over that without one.
"""

import time
from collections.abc import Callable

import torch
import typer
from rich.table import Table

from benchmarks import _environment, _report
from benchmarks import _options as options
from benchmarks._cases import BLOCK_SIZE, Batch, Case, Shape, make_batch
from benchmarks._timing import Timing, alternate, copies_for
from polykv_vllm import ops
from polykv_vllm.formats import FormatSpec
from polykv_vllm.keys import TREATMENTS, KeyTransform

MAX_DIFFERENCE = 0.1
"""Bound on ||out - untreated|| / ||untreated||: both are within the format's error."""
ARMS = (*TREATMENTS, "matrix")
"""The last one is what a calibration gives to keys of few bits."""
_FOOTPRINT_BYTES = 64 << 20  # more than a second-level cache: the same for all arms
_ROUNDS = 101


class TreatedKernel:
    """Store and attention of one layer with one treatment."""

    def __init__(
        self, batch: Batch, fmt: FormatSpec, treatment: str, threads: int
    ) -> None:
        num_kv_heads, head_dim = batch.key.shape[1:]
        generator = torch.Generator().manual_seed(1)
        scales = torch.rand(num_kv_heads, head_dim, generator=generator) + 0.5
        square = torch.randn(num_kv_heads, head_dim, head_dim, generator=generator)
        transform = KeyTransform(
            scales if "scale" in treatment else None,
            "hadamard" in treatment,
            torch.linalg.qr(square).Q if treatment == "matrix" else None,
        )
        self.batch, self.output = batch, torch.empty_like(batch.query)
        shape = (batch.num_blocks, num_kv_heads, BLOCK_SIZE)
        first = torch.zeros(*shape, fmt.slot_bytes(head_dim), dtype=torch.uint8)
        self._slots = batch.slots
        self._store = ops.layer_store(fmt, key_transform=transform, num_threads=threads)
        self._attend = ops.layer_attention(
            fmt, batch.scale, key_transform=transform, num_threads=threads
        )
        tables = (batch.block_table, batch.seq_lens, batch.query_start_loc)
        group = batch.query.shape[1] // num_kv_heads
        forest = ops.build_prefix_forest(*tables, BLOCK_SIZE, group)
        self._tables = ops.AttentionBatch(*tables, forest)
        self._copies = [first]
        self.store(0)

    def use_copies(self, number: int) -> None:
        """Read from `number` copies of the cache in turn."""
        self._copies = [self._copies[0].clone() for _ in range(number)]

    @property
    def cache_bytes(self) -> int:
        """Bytes of one copy."""
        return self._copies[0].nbytes

    def store(self, round_number: int) -> None:
        """Store every token."""
        cache = self._copies[round_number % len(self._copies)]
        self._store(self.batch.key, self.batch.value, cache, self._slots)

    def attend(self, round_number: int) -> None:
        """Attend with every query."""
        cache = self._copies[round_number % len(self._copies)]
        self._attend(self.batch.query, cache, self.output, self._tables)


def measure(
    case: Case,
    fmt: FormatSpec,
    threads: int,
    rounds: int,
    clock: Callable[[], float],
    is_store: bool,
) -> dict[str, Timing]:
    """Time one case with every treatment.

    Raises:
        typer.Exit: A treatment changes what attention computes.

    """
    batch = make_batch(case)
    arms = {name: TreatedKernel(batch, fmt, name, threads) for name in ARMS}
    for name, arm in arms.items():
        arm.attend(0)
        plain = arms["none"].output.float()
        difference = (arm.output.float() - plain).norm() / plain.norm()
        if not float(difference) <= MAX_DIFFERENCE:
            _report.console.print(f"[red]{case}: {name} is off by {difference:.3f}[/]")
            raise typer.Exit(1)
    copies = copies_for(_FOOTPRINT_BYTES, sum(a.cache_bytes for a in arms.values()))
    for arm in arms.values():
        arm.use_copies(copies)
    calls = {name: a.store if is_store else a.attend for name, a in arms.items()}
    return alternate(calls, rounds, warmup=2, clock=clock)


def cases_of(shape: Shape, quick: bool) -> dict[str, tuple[Case, bool]]:
    """Return {what it is: (case, whether it is the store)}."""
    tokens = BLOCK_SIZE if quick else 2048
    context = 4 * BLOCK_SIZE if quick else 3072
    chunk = BLOCK_SIZE // 2 if quick else 512
    cases = {
        f"decode over {context}": Case(shape, context),
        f"decode, 15 agents over {context}": Case(shape, context, agents=15),
        f"prefill {chunk} over {context - chunk}": Case(shape, context, chunk),
    }
    store = {f"store {tokens} tokens": (Case(shape, tokens), True)}
    return {name: (case, False) for name, case in cases.items()} | store


def main(
    format_name: options.Format = "polykv",
    shape: options.Shapes = None,
    threads: options.Threads = 1,
    rounds: int = _ROUNDS,
    cpu_time: options.CpuTime = False,
    quick: options.Quick = False,
    json: options.Json = None,
) -> None:
    """Time over that without a treatment, one layer."""
    torch.set_num_threads(threads)
    fmt, shapes = options.read_options(format_name, shape or options.SHAPES)
    clock = time.thread_time if cpu_time else time.perf_counter
    environment = _environment.describe(threads)
    _report.print_headline(environment)
    table = Table(title=f"{fmt.name}: one layer, median and ratio to no treatment")
    table.add_column("heads/KV heads/head size")
    table.add_column("case")
    for name in ARMS:
        table.add_column(name if name != "none" else "none, ms", justify="right")
    records: dict[str, dict[str, dict[str, float | int]]] = {}
    for each in shapes:
        for name, (case, is_store) in cases_of(each, quick).items():
            number = 3 if quick else rounds
            timings = measure(case, fmt, threads, number, clock, is_store)
            plain = timings["none"].median_s
            ratios = [f"{timings[t].median_s / plain:.3f}" for t in ARMS[1:]]
            table.add_row(str(each), name, _report.milliseconds(plain), *ratios)
            records[f"{each} {name}"] = {t: x.as_dict() for t, x in timings.items()}
        table.add_section()
    _report.console.print(table)
    record = {"benchmark": "keys", "environment": environment, "format": fmt.name}
    _report.write_json(json, {**record, "timings": records})


if __name__ == "__main__":
    typer.run(main)

# SPDX-License-Identifier: Apache-2.0
"""Is attention from the compressed cache faster than vLLM's over bf16, and exact?

    python -m benchmarks.attention

Each of our instruction sets against each attention path that vLLM has for this CPU.
A case whose error exceeds the bound gets no time.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import typer
from rich.table import Table

from benchmarks import _environment, _report, _vllm_library
from benchmarks import _options as options
from benchmarks._cases import BLOCK_SIZE, Case, Shape, make_batch
from benchmarks._kernels import (
    Kernel,
    PolykvKernel,
    VllmKernel,
    relative_error,
    vllm_choice,
    vllm_paths,
)
from benchmarks._timing import Timing, alternate, cold_footprint_bytes, copies_for
from polykv_vllm import ops
from polykv_vllm.formats import FormatSpec

MAX_ERROR = 3e-3
"""Bound on ||out - ref|| / ||ref||, ref being fp32 over the dequantized cache."""
MAX_FAST_ERROR = 1e-2
"""The same with 8-bit probabilities, the option `fast_arithmetic`."""
MAX_VLLM_ERROR = 1e-2
"""vLLM's kernel is checked too, so that a ratio compares two correct results."""
DECODE_RATIO, PREFILL_RATIO = 4.0, 2.0
AGENTS_RATIO = {64: (3.2, 3.8), 128: (2.8, 3.3)}
"""Head size to what many agents require, with exact and with fast arithmetic."""
AGENTS = (1, 15, 64)
OWN_TOKENS = 64
"""Of each agent of many, behind the tokens that they share."""
_MIN_ROUNDS, _MAX_ROUNDS = 7, 101


@dataclass(frozen=True)
class CaseResult:
    """Errors of all arms, and times unless one of them is wrong.

    Attributes:
        case: What was run.
        errors: Arm to relative error.
        failed: Arms whose error exceeds its bound.
        timings: Arm to timing; empty when an arm failed.
        copies: Copies of the cache that each arm went through.

    """

    case: Case
    errors: dict[str, float]
    failed: tuple[str, ...]
    timings: dict[str, Timing]
    copies: int = 0

    def ratio(self, ours: str, theirs: str) -> float:
        """Return how many times faster `ours` is, from the medians."""
        return self.timings[theirs].median_s / self.timings[ours].median_s


def our_isas(wanted: list[str] | None = None) -> list[str]:
    """Return `wanted`, or our vectorized kernels here, fastest first.

    Raises:
        typer.BadParameter: One of `wanted` does not exist here.

    """
    available = ops.available_isas()
    for isa in wanted or []:
        if isa not in available:
            raise typer.BadParameter(f"no isa {isa!r} here; {', '.join(available)}")
    slow = ("scalar", "reference")
    fast = [isa for isa in available if isa not in slow]
    return wanted or fast or [ops.current_isa()]


def requirement_cases(shape: Shape, agents: list[int]) -> list[Case]:
    """Return decode for every number of agents, and a prefill, of one shape."""
    cases = [
        _agents_case(shape, context, count)
        if count > 1
        else Case(shape, context, 1, 1, DECODE_RATIO)
        for context in (3072, 8192)
        for count in agents
    ]
    return [*cases, Case(shape, 3072, 1024, 1, PREFILL_RATIO)]


def _agents_case(shape: Shape, shared_tokens: int, agents: int) -> Case:
    exact, fast = AGENTS_RATIO.get(shape.head_dim, (None, None))
    return Case(shape, shared_tokens + OWN_TOKENS, 1, agents, exact, fast)


def quick_cases(shape: Shape) -> list[Case]:
    """Return small cases that show that the benchmark works, and nothing else."""
    return [Case(shape, 300), Case(shape, 200, 70), Case(shape, 300, agents=3)]


def make_arms(
    case: Case, fmt: FormatSpec, isas: list[str], threads: int
) -> dict[str, Kernel]:
    """Build the arms of a case: ours by ISA, vLLM's by path.

    Many agents are also attended without sharing and with the fast arithmetic.
    """
    batch = make_batch(case)
    variants: dict[str, dict[str, bool]] = {"": {}}
    if case.agents > 1:
        variants |= {" fast": {"fast": True}, " unshared": {"sharing": False}}
    arms: dict[str, Kernel] = {
        f"polykv {isa}{name}": PolykvKernel(batch, fmt, isa, threads, **options)
        for isa in isas
        for name, options in variants.items()
    }
    for path, name in vllm_paths().items():
        arms[f"vLLM {name}"] = VllmKernel(batch, path)
    return arms


def max_error(arm: Kernel) -> float:
    """Return the bound on an arm's error."""
    if isinstance(arm, VllmKernel):
        return MAX_VLLM_ERROR
    return MAX_FAST_ERROR if arm.is_fast else MAX_ERROR


def required_ratio(case: Case, arm: str) -> float | None:
    """Return what is required of one of our arms."""
    if arm.endswith("unshared"):
        return None
    return case.required_fast if arm.endswith("fast") else case.required


def refcheck(arms: dict[str, Kernel]) -> tuple[dict[str, float], tuple[str, ...]]:
    """Run every arm once; return its errors and the arms that exceed their bound."""
    errors, failed = {}, []
    for name, arm in arms.items():
        arm.output.fill_(math.nan)
        arm(0)
        errors[name] = relative_error(arm.output, arm.expected())
        if not errors[name] <= max_error(arm):  # also true for NaN
            failed.append(name)
    return errors, tuple(failed)


def measure(
    case: Case,
    arms: dict[str, Kernel],
    seconds: float,
    footprint_bytes: int,
    clock: Callable[[], float] = time.perf_counter,
) -> CaseResult:
    """Check the arms and, if all are right, time them.

    Args:
        case: What the arms compute.
        arms: From `make_arms`.
        seconds: About how long to measure.
        footprint_bytes: What the arms read before a copy of a cache is read again.
        clock: What to time with.

    """
    errors, failed = refcheck(arms)
    if failed:
        return CaseResult(case, errors, failed, {})
    checked = {name: arm.output.clone() for name, arm in arms.items()}
    read = sum(arm.copies[0].nbytes for arm in arms.values())
    copies = copies_for(footprint_bytes, read)
    start = time.perf_counter()
    for arm in arms.values():
        arm(0)
    rounds = int(seconds / (time.perf_counter() - start))
    rounds = min(_MAX_ROUNDS, max(_MIN_ROUNDS, rounds))
    for arm in arms.values():
        arm.use_copies(copies)
    timings = alternate(arms, rounds, clock=clock)
    # Ours are deterministic: what was timed must be what was checked, to the bit.
    changed = [
        name
        for name, arm in arms.items()
        if isinstance(arm, PolykvKernel) and not torch.equal(arm.output, checked[name])
    ]
    if changed:
        return CaseResult(case, errors, tuple(changed), {})
    return CaseResult(case, errors, (), timings, copies)


def table_of(shape: Shape, results: list[CaseResult]) -> Table:
    """Lay out the results of one shape, one row per case and kernel of ours."""
    theirs = [f"vLLM {name}" for name in vllm_paths().values()]
    chosen = vllm_paths().get(vllm_choice(shape.head_dim), "none of these")
    table = Table(
        title=f"heads/KV heads/head size {shape}; polykv's kernels beside vLLM's; vLLM "
        f"itself takes {chosen}",
        title_justify="left",
    )
    table.add_column("case", no_wrap=True)
    table.add_column("kernel", no_wrap=True)
    table.add_column("error", justify="right")
    table.add_column("ms (p10-p90)", justify="right", no_wrap=True)
    for name in theirs:
        table.add_column(f"{name.removeprefix('vLLM ')} ms", justify="right")
    for name in theirs:
        table.add_column(f"vs {name.removeprefix('vLLM ')}", justify="right")
    table.add_column("required", justify="right")
    for result in results:
        for name in (arm for arm in result.errors if arm not in theirs):
            table.add_row(*_row(result, name, theirs))
        table.add_section()
    return table


def _row(result: CaseResult, ours: str, theirs: list[str]) -> list[str]:
    case = result.case
    label = f"{case.agents} agents: {case}" if case.agents > 1 else f"{case}"
    cells = [label, ours.removeprefix("polykv "), f"{result.errors[ours]:.1e}"]
    if result.failed:
        wrong = ", ".join(f"{name} {result.errors[name]:.1e}" for name in result.failed)
        return [*cells, f"[red]refcheck failed: {wrong}[/]"]
    cells.append(_report.spread(result.timings[ours]))
    cells += [_report.milliseconds(result.timings[name].median_s) for name in theirs]
    required = required_ratio(case, ours)
    for number, name in enumerate(theirs):
        bar = required if number == 0 else None
        cells.append(_report.ratio(result.ratio(ours, name), bar))
    return [*cells, f"{required:g}x" if required else ""]


def as_record(result: CaseResult) -> dict[str, Any]:
    """Return a result for the JSON report."""
    case = result.case
    return {
        "shape": str(case.shape),
        "context": case.context,
        "query_len": case.query_len,
        "agents": case.agents,
        "required_ratio": case.required,
        "required_fast_ratio": case.required_fast,
        "errors": result.errors,
        "failed": list(result.failed),
        "copies": result.copies,
        "timings": {name: t.as_dict() for name, t in result.timings.items()},
        "ratios": {
            f"{ours} vs {theirs}": result.ratio(ours, theirs)
            for ours in result.timings
            for theirs in result.timings
            if ours.startswith("polykv") and theirs.startswith("vLLM")
        },
    }


def measure_shape(
    cases: list[Case],
    fmt: FormatSpec,
    isas: list[str],
    threads: int,
    **timing: Any,
) -> list[CaseResult]:
    """Measure the cases of one shape and print their table.

    Args:
        cases: At least one, all of one shape.
        fmt: Our format.
        isas: Our instruction sets.
        threads: Compute threads.
        timing: Further arguments of `measure`.

    """
    results = []
    for case in cases:
        arms = make_arms(case, fmt, isas, threads)
        results.append(measure(case, arms, **timing))
    _report.console.print(table_of(cases[0].shape, results))
    return results


def _take_library(name: str) -> str:
    """Make vLLM load the library `name`; return our kernels for the same CPUs."""
    if name not in _vllm_library.LIBRARIES:
        known = ", ".join(_vllm_library.LIBRARIES)
        raise typer.BadParameter(f"no library {name!r}; {known}")
    _vllm_library.take(name)
    return _vllm_library.ISAS[name]


def main(
    format_name: options.Format = "polykv",
    shape: options.Shapes = None,
    agents: options.Agents = None,
    isa: options.Isas = None,
    vllm_library: options.VllmLibrary = None,
    threads: options.Threads = 1,
    seconds: options.Seconds = 6.0,
    footprint_mib: options.Footprint = None,
    cpu_time: options.CpuTime = False,
    quick: options.Quick = False,
    json: options.Json = None,
) -> None:
    """Attention of polykv beside vLLM's own CPU kernel."""
    clock = options.read_clock(cpu_time, threads)
    fmt, shapes = options.read_options(format_name, shape or options.SHAPES)
    if vllm_library is not None:
        matching = _take_library(vllm_library)
        isa = isa or [matching]
    isas = our_isas(isa)
    if footprint_mib is None:
        footprint_mib = 0 if quick else cold_footprint_bytes() >> 20
    torch.set_num_threads(threads)
    environment = _environment.describe(threads)
    _report.print_headline(environment)
    _report.console.print(
        f"{fmt.name}, bf16 activations, block size {BLOCK_SIZE}, {footprint_mib} MiB "
        "read before a cache is read again, medians of alternating calls "
        f"({clock.__name__}), error bound {MAX_ERROR:.0e} (fast: {MAX_FAST_ERROR:.0e})"
    )
    timing = {
        "seconds": 0.05 if quick else seconds,
        "footprint_bytes": footprint_mib << 20,
        "clock": clock,
    }
    results = []
    for each in shapes:
        full = requirement_cases(each, agents or [*AGENTS])
        cases = quick_cases(each) if quick else full
        results += measure_shape(cases, fmt, isas, threads, **timing)
    record = {
        "benchmark": "attention",
        "environment": environment,
        "format": fmt.name,
        "quick": quick,
        "footprint_mib": footprint_mib,
        "clock": clock.__name__,
        "vllm_library": vllm_library,
        "vllm_path": {str(each): vllm_choice(each.head_dim) for each in shapes},
        "results": [as_record(result) for result in results],
    }
    _report.write_json(json, record)
    if any(result.failed for result in results):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)

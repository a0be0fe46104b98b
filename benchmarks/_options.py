# SPDX-License-Identifier: Apache-2.0
"""Command-line options that the benchmarks share, and what they mean."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import typer

from benchmarks._cases import Shape
from benchmarks._vllm_library import LIBRARIES
from polykv_vllm.formats import FormatSpec, get_format

SHAPES = ("9/3/64", "32/8/128")
"""Measured by default: SmolLM2-135M, and the usual one of an 8B model."""

Format = Annotated[
    str, typer.Option("--format", help="cache format, as in --kv-cache-dtype")
]
Shapes = Annotated[
    list[str] | None,
    typer.Option("--shape", help="heads/KV heads/head size; repeatable"),
]
Threads = Annotated[int, typer.Option(help="compute threads", min=1)]
Agents = Annotated[
    list[int] | None, typer.Option(help="sequences in a decode batch; repeatable")
]
Isas = Annotated[
    list[str] | None, typer.Option("--isa", help="our instruction sets; repeatable")
]
VllmLibrary = Annotated[
    str | None,
    typer.Option(
        help="measure beside this library of vLLM's kernels, and with our kernels for "
        f"the same CPUs unless --isa is given: {', '.join(LIBRARIES)}"
    ),
]
Seconds = Annotated[float, typer.Option(help="time to spend on a case")]
Footprint = Annotated[
    int | None,
    typer.Option(
        help="read this much before a cache is read again; the default, 1.25 x the "
        "last-level cache, keeps caches cold"
    ),
]
CpuTime = Annotated[
    bool,
    typer.Option(
        "--cpu-time", help="time on the CPU, for a busy machine; one thread only"
    ),
]
Quick = Annotated[bool, typer.Option("--quick", help="small cases: a test of the tool")]
Json = Annotated[Path | None, typer.Option(help="write the results here")]


def read_options(
    format_name: str, shapes: Sequence[str]
) -> tuple[FormatSpec, list[Shape]]:
    """Return format and shapes named on the command line.

    Raises:
        typer.BadParameter: One of them does not exist or does not fit the other.

    """
    try:
        fmt = get_format(format_name)
        parsed = [Shape.parse(text) for text in shapes]
        for shape in parsed:
            fmt.check_head_dim(shape.head_dim)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    return fmt, parsed


def read_clock(cpu_time: bool, threads: int) -> Callable[[], float]:
    """Return what to time with, in seconds.

    Raises:
        typer.BadParameter: Time on the CPU is asked for, of several threads.

    """
    if cpu_time and threads > 1:
        raise typer.BadParameter("--cpu-time sees one thread, not several")
    return time.thread_time if cpu_time else time.perf_counter

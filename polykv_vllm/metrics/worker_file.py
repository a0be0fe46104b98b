# SPDX-License-Identifier: Apache-2.0
"""The file through which a worker shows its figures to other processes.

    offset  bytes
         0      8  MAGIC, the last byte is the version
         8     56  zeros
        64     16 * 8  counters, float64: STEPS ... SHARED_TOKENS, one for each of
                       UNSHARED_REASONS, then windows: WINDOW_MISSING ... WINDOW_KEPT
       192     64 * 5 * 8  gauges of each KV cache group, float64: PREFIXES ...
      2752           zeros up to FILE_BYTES

One process writes, any number read, without a lock. Every figure is eight bytes at an
address divisible by eight (a mapping starts at a page, the figures at byte 64), and a
`memoryview` of float64 moves each with one 8-byte load or store, which x86-64 and
AArch64 never split: a reader sees the old figure or the new one. Figures that belong
together may differ by the step that is being recorded; counters make up for it at the
next scrape. (`struct` with a "<d" format moves single bytes, and so may `read()`: both
sides must go through this module.)
"""

import mmap
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeAlias

Figures: TypeAlias = "memoryview[float]"
"""A worker's counters and gauges."""

MAGIC: Final = b"polykv\0\x01"
FILE_BYTES: Final = 4096
_HEADER_BYTES: Final = 64

UNSHARED_REASONS: Final = (
    "no_other_reader",
    "own_chunk",
    "cost_rule",
    "switched_off",
)
"""Why a token was attended row by row; `docs/metrics.md` explains each."""

# Indices of float64 values after the header.
STEPS: Final = 0
ATTENTION_SECONDS: Final = 1
STORE_SECONDS: Final = 2
FOREST_SECONDS: Final = 3
SHARED_TOKENS: Final = 4
UNSHARED_TOKENS: Final[Mapping[str, int]] = {
    reason: SHARED_TOKENS + 1 + i for i, reason in enumerate(UNSHARED_REASONS)
}
# Windows of full precision, over all KV cache groups; the last three are gauges.
WINDOW_MISSING: Final = 9
WINDOW_PAGES: Final = 10
WINDOW_HELD: Final = 11
WINDOW_KEPT: Final = 12

# The gauges of KV cache group g start at GROUPS + g * len(GROUP_GAUGES), in this order.
GROUPS: Final = 16
GROUP_GAUGES: Final = (
    "prefixes",
    "readers_max",
    "readers_mean",
    "physical_bytes",
    "logical_bytes",
)
MAX_GROUPS: Final = 64

_NAME = re.compile(r"engine(\d+)-rank(\d+)\.metrics")


@dataclass(frozen=True)
class GroupGauges:
    """The latest batch of one KV cache group; see `recorder.BatchSharing`."""

    prefixes: float
    readers_max: float
    readers_mean: float
    physical_bytes: float
    logical_bytes: float


@dataclass(frozen=True)
class WorkerFigures:
    """What one worker has recorded.

    Attributes:
        engine: Index of its data parallel engine, vLLM's label `engine`.
        rank: Its rank in that engine.
        values: The counters, by the indices of this module.
        groups: The gauges of each KV cache group; zeros where there is none.

    """

    engine: int
    rank: int
    values: tuple[float, ...]
    groups: tuple[GroupGauges, ...]


def private_figures() -> Figures:
    """Return figures that no other process sees, all zero."""
    return _figures(memoryview(bytearray(FILE_BYTES)))


def open_figures(directory: Path, engine: int, rank: int) -> Figures:
    """Return the figures of a worker's file, for writing; made if it is missing.

    A worker that takes a dead one's place goes on with its figures, so that counters
    never fall.

    Args:
        directory: The server's; it exists.
        engine: Index of the data parallel engine.
        rank: Rank of the worker in the engine.

    Raises:
        OSError: The file cannot be made, or its file system is full.
        ValueError: There is a file by that name which is not ours.

    """
    return open_file(directory / f"engine{engine}-rank{rank}.metrics")


def open_file(path: Path) -> Figures:
    """Return the figures of a file, for writing; made, all zero, if it is missing.

    Raises:
        OSError: It cannot be made, or its file system is full.
        ValueError: There is a file by that name which is not ours.

    """
    if not path.exists():
        # Whole before it has its name: a reader never meets half a file. Written and
        # not just sized: a full tmpfs must say so now, and not by SIGBUS later.
        unfinished = path.with_name(f".{path.name}.{os.getpid()}")
        unfinished.write_bytes(MAGIC.ljust(FILE_BYTES, b"\0"))
        unfinished.rename(path)
    with path.open("r+b") as file:
        return _figures(memoryview(mmap.mmap(file.fileno(), FILE_BYTES)))


def read_all(directory: Path) -> list[WorkerFigures]:
    """Return the figures of every worker, in the order of engine and rank.

    Raises:
        ValueError: A file has a worker's name and is not one of this version.

    """
    found = []
    names = sorted(path.name for path in directory.glob("*.metrics"))
    for match in filter(None, map(_NAME.fullmatch, names)):
        try:
            values = read_file(directory / match.string)
        except FileNotFoundError:  # the server is ending
            continue
        found.append(_worker_figures(int(match[1]), int(match[2]), values))
    return sorted(found, key=lambda worker: (worker.engine, worker.rank))


def _worker_figures(engine: int, rank: int, values: list[float]) -> WorkerFigures:
    stride = len(GROUP_GAUGES)
    starts = range(GROUPS, GROUPS + MAX_GROUPS * stride, stride)
    groups = tuple(GroupGauges(*values[start : start + stride]) for start in starts)
    return WorkerFigures(engine, rank, tuple(values[:GROUPS]), groups)


def read_file(path: Path) -> list[float]:
    """Return the figures of a file.

    Raises:
        FileNotFoundError: It has gone.
        ValueError: It is not of this version.

    """
    with (
        path.open("rb") as file,
        mmap.mmap(file.fileno(), FILE_BYTES, access=mmap.ACCESS_READ) as mapping,
        memoryview(mapping) as view,
        _figures(view) as figures,
    ):
        return list(figures)


def _figures(view: memoryview) -> Figures:
    if view[: len(MAGIC)] not in (MAGIC, bytes(len(MAGIC))):
        found = bytes(view[: len(MAGIC)])
        raise ValueError(f"not a metrics file of this version: {found!r}")
    with view[_HEADER_BYTES:] as body:
        return body.cast("d")

# SPDX-License-Identifier: Apache-2.0
"""How results appear: required values beside figures, and JSON files on request."""

import json
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks._environment import headline
from benchmarks._timing import Timing

# Tables need some width when the output is not a terminal (rich then assumes 80).
console = Console()
if not console.is_terminal:
    console = Console(width=140)


def print_headline(environment: dict[str, Any]) -> None:
    """Print what the figures depend on, and warn when the machine has other work."""
    console.print(headline(environment), highlight=False)
    if environment["load_1min"] > environment["cpus"] / 2:
        console.print(
            f"[yellow]The machine is busy (load {environment['load_1min']}, "
            f"{environment['cpus']} CPUs): take these figures as a trial.[/]"
        )


def spread(timing: Timing) -> str:
    """Return the median and, in brackets, the 10th and 90th percentile; ms."""
    values = (timing.median_s, timing.p10_s, timing.p90_s)
    median, low, high = map(milliseconds, values)
    return f"{median} ({low}-{high})"


def milliseconds(seconds: float) -> str:
    """Return `seconds` as milliseconds with three significant digits."""
    value = seconds * 1e3
    digits = 3 if value < 1 else 2 if value < 10 else 1 if value < 100 else 0
    return f"{value:.{digits}f}"


def ratio(value: float, required: float | None = None) -> str:
    """Return e.g. `4.31x`, in green or red where a value is required."""
    text = f"{value:.2f}x"
    if required is None:
        return text
    return f"[green]{text}[/]" if value >= required else f"[red]{text}[/]"


def share(value: float, allowed: float | None = None) -> str:
    """Return `value` (0..1) in per cent, in green or red where a limit is given."""
    text = f"{100 * value:.2f} %"
    if allowed is None:
        return text
    return f"[green]{text}[/]" if value <= allowed else f"[red]{text}[/]"


def write_json(path: Path | None, record: dict[str, Any]) -> None:
    """Write `record` to `path`; does nothing without one."""
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n")
    console.print(f"written: {path}")

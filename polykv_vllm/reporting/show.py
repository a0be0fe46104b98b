# SPDX-License-Identifier: Apache-2.0
"""How a finished run appears in the terminal."""

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from polykv_vllm.reporting.table import Table


def show_run(
    console: Console,
    folder: Path,
    tables: Sequence[Table],
    notes: Sequence[str],
    problems: Sequence[str],
    files: Sequence[str],
) -> None:
    """Print all tables, what is wrong, and where the files are.

    Args:
        console: To print to.
        folder: Of the run.
        tables: In this order.
        notes: What a reader must know.
        problems: What failed.
        files: Names in the folder, before its pictures.

    """
    for table in tables:
        console.print()
        table.print(console)
    console.print()
    for note in notes:
        console.print(f"[yellow]note:[/] {escape(note)}", highlight=False)
    for problem in problems:
        console.print(f"[bold red]error:[/] {escape(problem)}", highlight=False)
    names = [*files, *sorted(path.name for path in folder.glob("*.png"))]
    console.print(f"in {folder}: {', '.join(names)}", highlight=False)

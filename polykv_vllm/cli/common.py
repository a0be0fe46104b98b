# SPDX-License-Identifier: Apache-2.0
"""What several commands have in common: options, a console, the end on an error."""

from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

_WIDTH = 150  # of tables where the output is no terminal

Threads = Annotated[
    int | None, typer.Option(help="Compute threads of the engine.", min=1)
]
Fresh = Annotated[
    bool, typer.Option("--fresh", help="Delete earlier results of the folder.")
]
ReportOnly = Annotated[
    bool, typer.Option("--report-only", help="Measure nothing; report again.")
]


def table_console() -> Console:
    """Return a console that has room for tables where it is no terminal."""
    console = Console()
    return console if console.is_terminal else Console(width=_WIDTH)


def fail(error: object) -> typer.Exit:
    """Print an error and return what ends the command with exit code 1."""
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    console.print("[bold red]error:[/]", escape(str(error)))
    return typer.Exit(1)

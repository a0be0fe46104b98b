# SPDX-License-Identifier: Apache-2.0
"""What is shown while runs are going on."""

import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)


class RunProgress:
    """Context manager: a bar over all runs; on no terminal, a line for each."""

    def __init__(self, console: Console, total: int) -> None:
        self._console = console
        self._total = total
        self._progress = Progress(
            SpinnerColumn(),
            MofNCompleteColumn(),
            BarColumn(bar_width=24),
            TimeElapsedColumn(),
            TextColumn("{task.description}"),
            console=console,
            transient=True,
            refresh_per_second=2,
        )
        self._task = self._progress.add_task("", total=total)
        self._started = 0.0
        self._words = ""

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._progress.stop()

    def start(self, words: str) -> None:
        """Show the run that begins."""
        self._words = words
        self._started = time.monotonic()
        self._progress.update(self._task, description=self._words)

    def stage(self, words: str) -> None:
        """Show what is being done for this run."""
        self._progress.update(self._task, description=f"{self._words}: {words}")

    def update(self, completed: int, total: int) -> None:
        """Show how many parts of the run are done, of how many."""
        self._total = total
        self._progress.update(self._task, completed=completed, total=total)

    def done(self) -> None:
        """Count the run, whether or not it gave figures."""
        self._progress.advance(self._task)
        if not self._console.is_terminal:
            number = int(self._progress.tasks[0].completed)
            seconds = time.monotonic() - self._started
            self._console.print(
                f"  {number}/{self._total} {self._words} ({seconds:.0f} s)",
                highlight=False,
            )

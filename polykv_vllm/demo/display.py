# SPDX-License-Identifier: Apache-2.0
"""What the demo shows while it works and at the end."""

import textwrap
from collections.abc import Iterator
from contextlib import contextmanager

from rich import box
from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from polykv_vllm.demo.agents import Turn, Wave
from polykv_vllm.demo.result import Arm, CacheFigures, WaveFigures

_ANSWER_CHARS = 150
_LEGEND = (
    "first token: median of the agents; tokens/s: of all agents together, from the "
    "first request to the last answer"
)
_MIN_TAIL_CHARS = 20
# Columns of the live table that are not the answer: mark, name, count, padding.
_LIVE_FIXED_CHARS = 20


@contextmanager
def step(console: Console, words: str) -> Iterator["StepView"]:
    """Show a running step with its elapsed time; leave one line when it is done."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        view = StepView(console, progress, words)
        yield view
        elapsed = progress.tasks[0].elapsed or 0.0
    console.print(f"[green]✓[/] {words} [dim]{elapsed:.1f} s[/]", highlight=False)


class StepView:
    """Tells what a step is doing right now."""

    def __init__(self, console: Console, progress: Progress, words: str) -> None:
        self._console = console
        self._progress = progress
        self._words = words
        self._task = progress.add_task(words, total=None)
        if not console.is_terminal:
            console.print(f"  {words} …", highlight=False)

    def update(self, detail: str) -> None:
        """Show `detail` behind the step's name; a line of its own in a log file."""
        self._progress.update(self._task, description=f"{self._words}: {detail}")
        if not self._console.is_terminal:
            self._console.print(f"    {detail}", highlight=False)


@contextmanager
def live_wave(console: Console, wave: Wave, title: str) -> Iterator[None]:
    """Show the growing answers of `wave`; on no terminal, show nothing."""
    if not console.is_terminal:
        console.print(f"  {title} …", highlight=False)
        yield
        return

    def draw() -> Table:
        return _live_table(wave, title, console.width)

    with Live(
        get_renderable=draw, console=console, refresh_per_second=8, transient=True
    ):
        yield


def _live_table(wave: Wave, title: str, width: int) -> Table:
    table = Table(title=title, title_justify="left", box=None, padding=(0, 1))
    table.add_column("", width=1)
    table.add_column("agent", style="cyan", no_wrap=True, width=10)
    table.add_column("answer", no_wrap=True, overflow="ellipsis", ratio=1)
    tail = max(_MIN_TAIL_CHARS, width - _LIVE_FIXED_CHARS)
    for turn in wave.turns:
        mark = "[green]✓[/]" if turn.done else "[yellow]…[/]"
        text = " ".join(turn.answer.split())
        if not text:
            text = "[dim]waiting for the first token[/]"
        else:
            text = escape(text if len(text) <= tail else f"…{text[-tail:]}")
        table.add_row(mark, turn.agent, text)
    return table


def print_answers(console: Console, wave: Wave, title: str) -> None:
    """Print each agent's question and the start of its answer."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, expand=True)
    table.add_column("agent", style="cyan", no_wrap=True)
    table.add_column("customer", ratio=2)
    table.add_column("answer", ratio=3)
    for turn in wave.turns:
        table.add_row(turn.agent, escape(turn.question), escape(shorten(turn)))
    console.print(table)


def shorten(turn: Turn) -> str:
    """Return the answer as one line of at most `_ANSWER_CHARS` characters."""
    return textwrap.shorten(turn.answer, _ANSWER_CHARS, placeholder=" …")


def print_result(console: Console, stock: CacheFigures, arms: list[Arm]) -> None:
    """Print the cache figures beside vLLM's own, then the waves of each arm."""
    ours = arms[-1].cache
    console.print(_cache_table(stock, ours))
    for source in (stock.source, ours.source):
        console.print(f"[dim]capacity of {source}[/]", highlight=False)
    console.print()
    console.print(_wave_table(arms))
    console.print(f"[dim]{_LEGEND}[/]", highlight=False)


def _cache_table(stock: CacheFigures, ours: CacheFigures) -> Table:
    mib = ours.memory_bytes / 2**20
    table = Table(title=f"KV cache in {mib:.0f} MiB", title_justify="left")
    table.box = box.ROUNDED
    table.add_column("")
    table.add_column(f"vLLM {stock.dtype}", justify="right")
    table.add_column(ours.dtype, justify="right", style="bold")
    table.add_column("ratio", justify="right", style="green")
    table.add_row(
        "bytes per token",
        f"{stock.token_bytes:,}",
        f"{ours.token_bytes:,}",
        f"{stock.token_bytes / ours.token_bytes:.2f}x",
    )
    table.add_row(
        "capacity in tokens",
        f"{stock.capacity_tokens:,}",
        f"{ours.capacity_tokens:,}",
        f"{ours.capacity_tokens / stock.capacity_tokens:.2f}x",
    )
    return table


def _wave_table(arms: list[Arm]) -> Table:
    title = "Requests: prompt tokens, and those found in the prefix cache"
    table = Table(title=title, title_justify="left", box=box.ROUNDED)
    if len(arms) > 1:
        table.add_column("cache")
    for heading in ("wave", "agents", "prompt", "found", "rate", "first token"):
        table.add_column(heading, justify="right")
    table.add_column("tokens/s", justify="right", style="bold")
    for arm in arms:
        label = [arm.cache.dtype] if len(arms) > 1 else []
        for number, wave in enumerate(arm.waves, start=1):
            table.add_row(*label, str(number), *_wave_cells(wave))
    return table


def _wave_cells(wave: WaveFigures) -> list[str]:
    return [
        str(wave.requests),
        f"{wave.prompt_tokens:,}",
        f"{wave.prefix.hit_tokens:,}",
        f"{wave.prefix.hit_rate:.1%}",
        f"{wave.first_token_s:.2f} s",
        f"{wave.tokens_per_s:.1f}",
    ]

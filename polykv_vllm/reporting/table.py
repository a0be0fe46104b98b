# SPDX-License-Identifier: Apache-2.0
"""A table of text, once for the terminal and once as Markdown."""

from dataclasses import dataclass, field

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table as RichTable


@dataclass
class Table:
    """Rows of text; all columns but those of words are right-aligned.

    Attributes:
        title: Above the table.
        columns: Headings.
        rows: Cells.
        words: How many columns, from the left, hold words.
        legend: Below the table.
        groups: Row numbers before which a line is drawn.

    """

    title: str
    columns: list[str]
    words: int = 1
    rows: list[list[str]] = field(default_factory=list)
    legend: str = ""
    groups: set[int] = field(default_factory=set)

    def markdown(self) -> str:
        """Return the table as GitHub's Markdown."""
        marks = ["---" if n < self.words else "---:" for n in range(len(self.columns))]
        lines = [self.columns, marks, *self.rows]
        body = "\n".join(f"| {' | '.join(line)} |" for line in lines)
        legend = "".join(f"\n\n{line}" for line in self.legend.splitlines())
        return f"### {self.title}\n\n{body}{legend}\n"

    def print(self, console: Console) -> None:
        """Print the table."""
        table = RichTable(
            title=self.title, title_justify="left", title_style="bold", box=box.SIMPLE
        )
        for number, heading in enumerate(self.columns):
            is_words = number < self.words
            table.add_column(
                heading, justify="left" if is_words else "right", no_wrap=is_words
            )
        for number, row in enumerate(self.rows):
            if number in self.groups:
                table.add_section()
            table.add_row(*map(escape, row))
        console.print(table)
        for line in self.legend.splitlines():
            console.print(f"[dim]{escape(line)}[/]", highlight=False)

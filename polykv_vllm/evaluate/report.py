# SPDX-License-Identifier: Apache-2.0
"""Writes the report of a run folder: JSON, Markdown and plots; shows the tables."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from polykv_vllm.evaluate.arms import REFERENCE
from polykv_vllm.evaluate.results import RunStore
from polykv_vllm.evaluate.suite import SuiteReport
from polykv_vllm.evaluate.suites import SUITES
from polykv_vllm.reporting.environment import headline
from polykv_vllm.reporting.figure import DPI, STYLE
from polykv_vllm.reporting.files import write_json
from polykv_vllm.reporting.show import show_run

JSON_NAME, MARKDOWN_NAME = "results.json", "report.md"


@dataclass
class Report:
    """What a run folder has to say.

    Attributes:
        store: The folder.
        command: That made it.
        problems: Arms that failed.
        suites: By name.

    """

    store: RunStore
    command: str
    problems: Sequence[str] = ()
    suites: dict[str, SuiteReport] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.records = {
            suite: _reference_first(arms)
            for suite, arms in self.store.records().items()
        }
        self.suites = {
            suite: SUITES[suite].report(records)
            for suite, records in self.records.items()
            if suite in SUITES
        }

    @property
    def notes(self) -> list[str]:
        """Of all suites, and whether the records belong together."""
        notes = [note for report in self.suites.values() for note in report.notes]
        every = [record for arms in self.records.values() for record in arms.values()]
        commits = sorted({str(r["environment"]["commit"]) for r in every})
        if len(commits) > 1:
            notes.append(f"records come from different commits: {', '.join(commits)}")
        return notes

    def write(self) -> None:
        """Write `results.json`, `report.md` and the plots into the folder."""
        record = {
            "command": self.command,
            "settings": self.store.settings(),
            "records": self.records,
            "notes": self.notes,
            "problems": list(self.problems),
        }
        write_json(self.store.path / JSON_NAME, record)
        plots = self._draw()
        (self.store.path / MARKDOWN_NAME).write_text(self._markdown(plots))

    def show(self, console: Console) -> None:
        """Print all tables, what is wrong, and where the files are."""
        tables = [table for report in self.suites.values() for table in report.tables]
        files = (JSON_NAME, MARKDOWN_NAME)
        show_run(console, self.store.path, tables, self.notes, self.problems, files)

    def _draw(self) -> list[str]:
        import matplotlib

        matplotlib.use("agg")
        names = []
        with matplotlib.rc_context(STYLE):
            for report in self.suites.values():
                for name, draw in report.plots.items():
                    path = self.store.path / name
                    draw().savefig(path, dpi=DPI, bbox_inches="tight")
                    names.append(name)
        return names

    def _markdown(self, plots: Sequence[str]) -> str:
        settings = self.store.settings()
        parts = [f"## Quality of {settings['model']}\n", f"`{self.command}`\n"]
        parts.append(f"Engine: {settings['engine']} ({settings['engine_version']})\n")
        for records in list(self.records.values())[:1]:
            environment = list(records.values())[-1]["environment"]
            parts.append(headline(environment).replace("\n", "  \n") + "\n")
        for report in self.suites.values():
            parts += [table.markdown() for table in report.tables]
        parts += [f"![{Path(name).stem}]({name})\n" for name in plots]
        parts += [f"Note: {note}\n" for note in self.notes]
        parts += [f"**Error:** {problem}\n" for problem in self.problems]
        return "\n".join(parts)


def _reference_first(arms: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return dict(sorted(arms.items(), key=lambda item: item[0] != REFERENCE))

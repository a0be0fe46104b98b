# SPDX-License-Identifier: Apache-2.0
"""Writes the report: JSON, Markdown and plots; shows the tables."""

import json
from pathlib import Path
from typing import Any

from rich.console import Console

from polykv_vllm.bench.measure import COLD, WARM
from polykv_vllm.bench.plots import draw_all
from polykv_vllm.bench.summary import CaseArm, Summary
from polykv_vllm.bench.tables import all_tables
from polykv_vllm.reporting.environment import headline
from polykv_vllm.reporting.files import write_json
from polykv_vllm.reporting.show import show_run

JSON_NAME, MARKDOWN_NAME = "report.json", "report.md"


def write(summary: Summary, output: Path, command: str) -> None:
    """Write `report.json`, `report.md` and the plots into `output`."""
    record = as_record(summary, command)
    write_json(output / JSON_NAME, record)
    plots = draw_all(summary, output)
    (output / MARKDOWN_NAME).write_text(_markdown(summary, command, plots))


def show(summary: Summary, output: Path, console: Console) -> None:
    """Print all tables, what is wrong, and where the files are."""
    files = (JSON_NAME, MARKDOWN_NAME)
    tables = all_tables(summary)
    show_run(console, output, tables, summary.notes, summary.problems, files)


def as_record(summary: Summary, command: str) -> dict[str, Any]:
    """Return everything as one JSON object."""
    return {
        "benchmark": "agents",
        "command": command,
        "scenario": json.loads(summary.scenario.model_dump_json()),
        "environment": summary.environments[-1] if summary.environments else None,
        "serve_commands": summary.commands,
        "caches": summary.caches,
        "cases": {
            name: {arm: _row_record(summary, name, row) for arm, row in arms.items()}
            for name, arms in summary.cases.items()
        },
        "memory": summary.memory,
        "distinct": summary.distinct,
        "notes": summary.notes,
        "problems": summary.problems,
    }


def _row_record(summary: Summary, case: str, row: CaseArm) -> dict[str, Any]:
    others = [name for name in summary.cases[case] if name != row.arm.name]
    return {
        "agents": row.agents,
        "shared_tokens": row.shared_tokens,
        "median_decode_tokens_per_s": row.decode,
        "decode_over": {
            name: summary.ratio(case, row.arm.name, name) for name in others
        },
        "saved_of_attention_time": {
            name: summary.possible(case, row.arm.name, name) for name in others
        },
        "hit_rate": {phase: row.hit_rate(phase) for phase in (COLD, WARM)},
        "cold": row.cold,
        "warm": row.warm,
    }


def _markdown(summary: Summary, command: str, plots: list[str]) -> str:
    parts = ["## Many agents with one system prompt\n", f"`{command}`\n"]
    if summary.environments:
        parts.append(headline(summary.environments[-1]).replace("\n", "  \n") + "\n")
    parts += [table.markdown() for table in all_tables(summary)]
    parts += [f"![{Path(name).stem}]({name})\n" for name in plots]
    parts += [f"Note: {note}\n" for note in summary.notes]
    parts += [f"**Error:** {problem}\n" for problem in summary.problems]
    return "\n".join(parts)

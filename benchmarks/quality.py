# SPDX-License-Identifier: Apache-2.0
"""Records runs of `polykv eval`: quality.json of the package, tables of the docs.

    polykv eval MODEL ... --output eval-results/MODEL
    polykv eval MODEL --suite gsm8k ... --output eval-results/MODEL-gsm8k
    python -m benchmarks.quality eval-results/*

A run replaces what is recorded of the same model and suite, the rest stays.
"""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from polykv_vllm.capacity import load_config
from polykv_vllm.evaluate.arms import REFERENCE
from polykv_vllm.evaluate.report import JSON_NAME
from polykv_vllm.evaluate.tasks import TASKS
from polykv_vllm.formats import FORMATS, get_format, is_polykv_dtype
from polykv_vllm.keys import AUTO
from polykv_vllm.models import resolve_model
from polykv_vllm.quality import QUALITY_FILE, Measurement, measurements
from polykv_vllm.reporting.files import write_json
from polykv_vllm.reporting.table import Table
from polykv_vllm.support import check_model

DOCUMENT = Path(__file__).resolve().parent.parent / "docs" / "quality.md"
BEGIN, END = "<!-- begin: python -m benchmarks.quality -->", "<!-- end -->"


def rows_of(run: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the measurements of one run's formats.

    Args:
        run: `results.json` of a run folder.

    """
    model = run["settings"]["model"]
    config = load_config(resolve_model(model)).get_text_config()
    rows = []
    for arm, record in run["records"].get("perplexity", {}).items():
        if (key := _format_of(arm)) is None:
            continue
        dtype, treatment = key
        support, figures = check_model(config, dtype), record["figures"]
        row = {
            "model": model,
            "architecture": support.architecture,
            "head_size": support.head_size,
            "kv_cache_dtype": dtype,
            "key_treatment": treatment,
            "bytes_per_token": record["bytes_per_token"],
            "top1": round(figures["top1"]["value"], 4),
            "tokens": figures["tokens"],
        }
        for name in ("ppl_change", "kld"):
            row[name] = _ends(figures[name])
        rows.append(row)
    return rows


def task_rows_of(run: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the scores of one run's formats in its tasks, beside bf16's."""
    rows = []
    for suite in _tasks_of(run):
        records = run["records"][suite]
        reference = records[REFERENCE]["figures"]
        for arm, record in records.items():
            if (key := _format_of(arm)) is None:
                continue
            figures = record["figures"]
            row = {"model": run["settings"]["model"], "suite": suite}
            row |= {"kv_cache_dtype": key[0], "key_treatment": key[1]}
            row |= {name: figures[name] for name in ("correct", "scored")}
            row["reference"] = reference["correct"]
            row["reference_share"] = _ends(reference["score"])
            rows.append(row)
    return rows


def _tasks_of(run: dict[str, Any]) -> list[str]:
    """Return the task suites that a run has of bf16 and of others."""
    return [suite for suite in run["records"] if suite in TASKS]


def _format_of(arm: str) -> tuple[str, str] | None:
    """Return the cache dtype and the key treatment of an arm, None if not ours."""
    name, _, treatment = arm.partition("+")
    if not is_polykv_dtype(name):
        return None
    return get_format(name).name, treatment or AUTO


def _ends(interval: dict[str, float]) -> list[float]:
    return [round(interval[end], 6) for end in ("value", "low", "high")]


def command_of(run: dict[str, Any], suite: str) -> str:
    """Return the command that measures the same again, wherever results may lie."""
    settings = run["settings"]
    arms = [arm for arm in run["records"][suite] if arm != REFERENCE]
    command = f"polykv eval {settings['model']} --arms {','.join(arms)}"
    asked = settings["suites"][suite]
    if suite in TASKS:
        return f"{command} --suite {suite} --items {asked['items']}"
    chunks = asked["chunks_asked"]
    return command if chunks is None else f"{command} --max-chunks {chunks}"


def _run_record(run: dict[str, Any], suite: str) -> dict[str, Any]:
    """Return how a suite was measured: command, settings, machine, versions."""
    environment = next(iter(run["records"][suite].values()))["environment"]
    settings = dict(run["settings"]["suites"][suite])
    settings.pop("item_ids", None)
    return {
        "command": command_of(run, suite),
        "settings": settings,
        "cpu": environment["cpu"],
        "commit": environment["commit"],
        "versions": environment["versions"],
    }


def support_matrix() -> Table:
    """Return the table of docs/quality.md, from what is recorded."""
    columns = ["model", "architecture", "head size", "format", "keys", "B/token"]
    columns += ["dPPL %", "95 %", "KLD", "95 %", "top-1 %", "tasks", "verdict"]
    table = Table("Support matrix", columns, words=5)
    before = None
    for each in sorted(measurements(), key=_place):
        if before not in (None, each.model):
            table.groups.add(len(table.rows))
        before = each.model
        change = [f"{100 * value:+.2f}" for value in each.ppl_change]
        kld = [f"{value:.4f}" for value in each.kld]
        table.rows.append(
            [
                each.model,
                each.architecture,
                str(each.head_size),
                each.kv_cache_dtype,
                each.key_treatment,
                f"{each.bytes_per_token:,}",
                change[0],
                f"{change[1]} .. {change[2]}",
                kld[0],
                f"{kld[1]} .. {kld[2]}",
                f"{100 * each.top1:.1f}",
                "; ".join(map(str, each.tasks)),
                str(each.verdict),
            ]
        )
    return table


def _place(each: Measurement) -> tuple[int, int, bool]:
    """Models as they were recorded, formats as they are listed, `auto` first."""
    models = [other.model for other in measurements()]
    formats = list(FORMATS)
    return (
        models.index(each.model),
        formats.index(each.kv_cache_dtype),
        each.key_treatment != AUTO,
    )


def write_document() -> None:
    """Replace the generated part of docs/quality.md."""
    text = DOCUMENT.read_text()
    start, end = text.index(BEGIN) + len(BEGIN), text.index(END)
    body = support_matrix().markdown().split("\n", 2)[2]
    DOCUMENT.write_text(f"{text[:start]}\n\n{body}\n{text[end:]}")


def _replace(
    recorded: list[dict[str, Any]], rows: list[dict[str, Any]], key: tuple[str, ...]
) -> None:
    """Put rows in the place of those with the same key, in place."""
    new = {tuple(row[name] for name in key) for row in rows}
    kept = [row for row in recorded if tuple(row[name] for name in key) not in new]
    recorded[:] = kept + rows


def main(
    folders: Annotated[list[Path], typer.Argument(help="run folders of polykv eval")],
) -> None:
    """Record what `polykv eval` measured."""
    record = json.loads(QUALITY_FILE.read_text())
    for folder in folders:
        run = json.loads((folder / JSON_NAME).read_text())
        rows, tasks = rows_of(run), task_rows_of(run)
        if not rows and not tasks:
            raise typer.BadParameter(
                f"{folder} has neither perplexity nor a task's score of a polykv format"
            )
        _replace(record["measurements"], rows, ("model",))
        _replace(record["tasks"], tasks, ("model", "suite"))
        model = run["settings"]["model"]
        measured = record["runs"].setdefault(model, {})
        for suite in [*(["perplexity"] if rows else []), *_tasks_of(run)]:
            measured[suite] = _run_record(run, suite)
    write_json(QUALITY_FILE, record)
    measurements.cache_clear()
    write_document()


if __name__ == "__main__":
    typer.run(main)

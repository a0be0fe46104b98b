# SPDX-License-Identifier: Apache-2.0
"""Records runs of `polykv eval`: quality.json of the package, tables of the docs.

    polykv eval MODEL ... --output eval-results/MODEL
    python -m benchmarks.quality eval-results/*

Measurements of other models stay as they are.
"""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from polykv_vllm.capacity import load_config
from polykv_vllm.evaluate.arms import REFERENCE
from polykv_vllm.evaluate.report import JSON_NAME
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
        name, _, treatment = arm.partition("+")
        if not is_polykv_dtype(name):
            continue
        support, figures = check_model(config, name), record["figures"]
        row = {
            "model": model,
            "architecture": support.architecture,
            "head_size": support.head_size,
            "kv_cache_dtype": get_format(name).name,
            "key_treatment": treatment or AUTO,
            "bytes_per_token": record["bytes_per_token"],
            "top1": round(figures["top1"]["value"], 4),
            "tokens": figures["tokens"],
        }
        for key in ("ppl_change", "kld"):
            ends = (figures[key][end] for end in ("value", "low", "high"))
            row[key] = [round(value, 6) for value in ends]
        rows.append(row)
    return rows


def command_of(run: dict[str, Any]) -> str:
    """Return the command that measures the same again, wherever results may lie."""
    settings = run["settings"]
    arms = [arm for arm in run["records"]["perplexity"] if arm != REFERENCE]
    chunks = settings["suites"]["perplexity"]["chunks_asked"]
    limit = "" if chunks is None else f" --max-chunks {chunks}"
    return f"polykv eval {settings['model']} --arms {','.join(arms)}{limit}"


def support_matrix() -> Table:
    """Return the table of docs/quality.md, from what is recorded."""
    columns = ["model", "architecture", "head size", "format", "keys", "B/token"]
    columns += ["dPPL %", "95 %", "KLD", "95 %", "top-1 %", "verdict"]
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


def main(
    folders: Annotated[list[Path], typer.Argument(help="run folders of polykv eval")],
) -> None:
    """Record what `polykv eval` measured."""
    record = json.loads(QUALITY_FILE.read_text())
    for folder in folders:
        run = json.loads((folder / JSON_NAME).read_text())
        rows = rows_of(run)
        if not rows:
            raise typer.BadParameter(f"{folder} has no perplexity of a polykv format")
        others = [r for r in record["measurements"] if r["model"] != rows[0]["model"]]
        record["measurements"] = others + rows
        environment = next(iter(run["records"]["perplexity"].values()))["environment"]
        record["runs"][rows[0]["model"]] = {
            "command": command_of(run),
            "settings": run["settings"]["suites"]["perplexity"],
            "cpu": environment["cpu"],
            "commit": environment["commit"],
            "versions": environment["versions"],
        }
    write_json(QUALITY_FILE, record)
    measurements.cache_clear()
    write_document()


if __name__ == "__main__":
    typer.run(main)

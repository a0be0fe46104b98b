# SPDX-License-Identifier: Apache-2.0
"""Which transform lets keys and values keep two bits? The published local studies.

    python -m benchmarks.wush smollm2-135m-instruct --text PASSAGES --field ctxs.text

Six transforms, of keys as they are and of centred ones, three quantizers, three bit
widths: first the error of each layer's attention, every layer given exact inputs and no
windows; then perplexity, divergence and top-1 agreement of the whole model with windows
of full precision. What is finished is kept in the folder and not measured again.
"""

import json
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from transformers.utils import logging

from benchmarks import _environment, _report
from benchmarks import _options as options
from benchmarks._wush_model import GRID_QUANTIZERS, NOTHING, StudyModel, Variant
from benchmarks._wush_report import (
    SETS,
    draw,
    error_table,
    geometric_means,
    quality_table,
)
from polykv_vllm.calibrate.build import TRANSFORMS, build_transforms
from polykv_vllm.calibrate.collect import collect
from polykv_vllm.calibrate.run import load_model
from polykv_vllm.calibrate.statistics import Statistics
from polykv_vllm.calibrate.text import cut_sequences, read_texts
from polykv_vllm.evaluate import text
from polykv_vllm.evaluate.perplexity import default_text
from polykv_vllm.evaluate.scoring import score
from polykv_vllm.models import resolve_model
from polykv_vllm.reference.lowbit import BITS
from polykv_vllm.reference.windows import Windows
from polykv_vllm.reporting.files import write_json


def statistics_of(
    folder: Path, model: str, sequences: list[tuple[int, ...]]
) -> Statistics:
    """Return the statistics in the folder, or collect them."""
    path = folder / "statistics.safetensors"
    if not path.exists():
        _report.console.print("reading the calibration text")
        collect(load_model(model), sequences, aware=True).save(path)
    return Statistics.load(path)


class Log:
    """Results by name, in a file that is always complete.

    Args:
        path: The file.
        settings: Of the run; results of others are not continued.

    """

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        self._path = path
        self.record: dict[str, Any] = {
            "settings": settings,
            "errors": {},
            "quality": {},
        }
        if path.exists():
            found = json.loads(path.read_text())
            if found["settings"] != settings:
                raise typer.BadParameter(
                    f"{path} has results of other settings: choose another --output"
                )
            self.record = found

    def add(self, part: str, name: str, result: Any) -> None:
        """Keep a result."""
        self.record[part][name] = result
        write_json(self._path, self.record)


def measure_errors(
    model: StudyModel, chunks: list[tuple[int, ...]], log: Log, variants: list[Variant]
) -> None:
    """Keep, for every variant, the relative error of each layer's attention output."""
    todo = [v for v in variants if v.name not in log.record["errors"]]
    if not todo:
        return
    squares = np.array([model.layer_errors(chunk, todo) for chunk in chunks]).sum(0)
    for index, variant in enumerate(todo):
        relative = np.sqrt(squares[:, index, 0] / squares[:, index, 1])
        log.add("errors", variant.name, relative.round(6).tolist())


def measure_quality(
    model: StudyModel,
    chunks: list[tuple[int, ...]],
    begin: int,
    windows: Windows,
    log: Log,
    variants: list[Variant],
) -> None:
    """Keep, for every variant and chunk, what the whole model predicts."""
    for number, tokens in enumerate(chunks):
        names = {v.name: v for v in variants}
        todo = [
            v
            for name, v in names.items()
            if len(log.record["quality"].get(name, [])) <= number
        ]
        if not todo:
            continue
        targets = torch.tensor(tokens[begin:])
        reference = model.hidden(tokens, begin, None, NOTHING)
        plain = float(score(reference, targets, model.head).nll.mean())
        for variant in todo:
            hidden = model.hidden(tokens, begin, variant, windows)
            found = score(hidden, targets, model.head, reference)
            if found.kld is None or found.agrees is None:
                raise RuntimeError("a score with a reference has a divergence")
            result = {
                "plain": plain,
                "nll": float(found.nll.mean()),
                "kld": float(found.kld.mean()),
                "top1": float(found.agrees.float().mean()),
            }
            before = log.record["quality"].get(variant.name, [])
            log.add("quality", variant.name, [*before, result])
        _report.console.print(f"chunk {number + 1} of {len(chunks)}", highlight=False)


def main(
    model: Annotated[str, typer.Argument(help="a directory, or one of polykv model")],
    calibration_text: Annotated[list[Path], typer.Option("--text")],
    field: Annotated[str, typer.Option(help="of .jsonl lines")] = "text",
    output: Annotated[Path, typer.Option("--output", "-o")] = Path("wush-results"),
    sequences: Annotated[int, typer.Option(min=1)] = 128,
    sequence_tokens: Annotated[int, typer.Option(min=16)] = 512,
    evaluation_text: Annotated[Path | None, typer.Option()] = None,
    chunk_tokens: Annotated[int, typer.Option(min=2)] = 2048,
    max_chunks: Annotated[int, typer.Option(min=1)] = 2,
    error_chunks: Annotated[int, typer.Option(min=0)] = 2,
    error_tokens: Annotated[int, typer.Option(min=16)] = 512,
    sink: Annotated[int, typer.Option(min=0)] = 16,
    recent: Annotated[int, typer.Option(min=0)] = 128,
    flush: Annotated[int, typer.Option(min=0, help="0: quantize on arrival")] = 0,
    bits: Annotated[list[int], typer.Option()] = list(BITS),  # noqa: B006
    transforms: Annotated[list[str], typer.Option("--transform")] = list(TRANSFORMS),  # noqa: B006
    quantizers: Annotated[list[str], typer.Option("--quantizer")] = list(  # noqa: B006
        GRID_QUANTIZERS
    ),
    centred: Annotated[bool, typer.Option(help="transforms of centred keys")] = True,
    plain: Annotated[bool, typer.Option(help="transforms of keys as they are")] = True,
    threads: options.Threads = 1,
) -> None:
    """Compare transforms and quantizers in simulation on a real model."""
    torch.set_num_threads(threads)
    logging.disable_progress_bar()
    path = str(resolve_model(model))
    tokenizer = text.load_tokenizer(path)
    source = evaluation_text or default_text()
    tokens = text.tokenize(text.read_text(source), tokenizer)
    leading = text.leading_tokens(tokenizer)
    cut = text.Cut(chunk_tokens, max_chunks=max_chunks)
    content = read_texts(calibration_text, field)
    output.mkdir(parents=True, exist_ok=True)
    calibration = cut_sequences(content, tokenizer, sequences, sequence_tokens, 0)
    statistics = statistics_of(output, path, calibration)
    settings = {
        "model": model,
        "text": source.name,
        "calibration": [each.name for each in calibration_text],
        "calibration_tokens": statistics.tokens,
        "chunk_tokens": chunk_tokens,
        "error_chunks": error_chunks,
        "error_tokens": error_tokens,
        "windows": [sink, recent, flush],
    }
    log = Log(output / "wush.json", settings)
    _report.print_headline(_environment.describe(threads))
    sets = {
        each: build_transforms(
            each.transform, statistics, center_keys=each.centers_keys
        )
        for each in SETS
        if each.transform in transforms and (centred if each.centers_keys else plain)
    }
    study = StudyModel(path, sets)
    variants = [Variant(s, q, b) for b in bits for q in quantizers for s in sets]
    short = text.Cut(error_tokens, max_chunks=max(error_chunks, 1))
    pieces = text.cut_text(tokens, leading, short)[:error_chunks]
    if pieces:
        measure_errors(study, pieces, log, variants)
    chunks = text.cut_text(tokens, leading, cut)
    windows = Windows(sink, recent, flush or None)
    measure_quality(study, chunks, cut.begin, windows, log, variants)
    report(log.record, output)


def report(record: dict[str, Any], output: Path) -> None:
    """Print both tables, write them and the plot."""
    tables = [quality_table(record)]
    if record["errors"]:
        tables.insert(0, error_table(geometric_means(record["errors"])))
        draw(record["errors"], output / "layers.png")
    for table in tables:
        table.print(_report.console)
    (output / "wush.md").write_text("\n".join(table.markdown() for table in tables))


if __name__ == "__main__":
    typer.run(main)

# SPDX-License-Identifier: Apache-2.0
"""Which codec loses least? Variants in simulation, on real text.

    python -m benchmarks.codec smollm2-135m-instruct --set keys --set bytes

A transformers model reads chunks of a text; its cache gives back what a variant makes
of keys and values. What wins becomes a format, and is measured again on the real
engine: `polykv eval`.
"""

from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
import typer
from rich.table import Table
from transformers.utils import logging

from benchmarks import _environment, _report
from benchmarks import _options as options
from benchmarks._codec_model import StudyModel
from benchmarks._codec_variants import SETS, Variant
from polykv_vllm.evaluate import text
from polykv_vllm.evaluate.perplexity import default_text
from polykv_vllm.evaluate.scoring import Scores, score
from polykv_vllm.evaluate.statistics import bootstrap_mean
from polykv_vllm.models import resolve_model

Dtype = Literal["bfloat16", "float32"]


def measure(
    model: StudyModel,
    chunks: list[tuple[int, ...]],
    begin: int,
    variants: list[Variant],
) -> tuple[dict[str, list[Scores]], list[float], list[list[list[float]]]]:
    """Score every chunk with every variant.

    Args:
        model: Of the study.
        chunks: Of tokens.
        begin: First scored position of a chunk.
        variants: To compare.

    Returns:
        Scores by variant and chunk; each chunk's mean negative log-likelihood without
        a codec; each chunk's `SimulatedCache.value_rms` by layer.

    """
    found: dict[str, list[Scores]] = {variant.name: [] for variant in variants}
    plain, spreads = [], []
    for number, tokens in enumerate(chunks, 1):
        targets = torch.tensor(tokens[begin:])
        reference, spread = model.hidden(tokens, begin, None)
        spreads.append(spread)
        plain.append(float(score(reference, targets, model.head).nll.mean()))
        for variant in variants:
            hidden, _ = model.hidden(tokens, begin, variant)
            found[variant.name].append(score(hidden, targets, model.head, reference))
        _report.console.print(f"chunk {number} of {len(chunks)}", highlight=False)
    return found, plain, spreads


def summarize(
    variant: Variant, scores: list[Scores], plain: list[float]
) -> dict[str, Any]:
    """Return the figures of a variant; intervals are over chunks."""

    def mean(name: str) -> list[float]:
        return [float(getattr(each, name).float().mean()) for each in scores]

    differences = np.array(mean("nll")) - np.array(plain)
    change = bootstrap_mean(list(differences), seed=0)
    return {
        "bits_per_pair": variant.bits,
        "treatment": variant.treatment,
        "ppl_change": change.map(lambda x: float(np.expm1(x))).as_dict(),
        "kld": bootstrap_mean(mean("kld"), seed=0).as_dict(),
        "top1": float(np.mean(mean("agrees"))),
    }


def _table(title: str, records: dict[str, dict[str, Any]]) -> Table:
    table = Table(title=title)
    table.add_column("variant")
    for column in ("bits", "dPPL % (95 %)", "KLD", "top-1 %"):
        table.add_column(column, justify="right")
    for name, record in records.items():
        change = record["ppl_change"]
        low, high = (100 * (change[side] or 0.0) for side in ("low", "high"))
        table.add_row(
            name,
            f"{record['bits_per_pair']:g}",
            f"{100 * change['value']:+.2f} ({low:+.2f}..{high:+.2f})",
            f"{record['kld']['value']:.4f}",
            f"{100 * record['top1']:.1f}",
        )
    return table


def _rms_table(rms: list[list[float]]) -> Table:
    """Show why one scale for all rows of a layer fails."""
    table = Table(title="root mean square of a row of values, by layer")
    for column in ("layer", "5 %", "median", "95 %", "largest"):
        table.add_column(column, justify="right")
    for layer, quantiles in enumerate(rms):
        table.add_row(str(layer), *(f"{value:.3f}" for value in quantiles))
    return table


def main(
    model: Annotated[str, typer.Argument(help="a directory, or one of polykv model")],
    sets: Annotated[
        list[str], typer.Option("--set", help=f"{', '.join(SETS)}; repeatable")
    ] = ["bytes"],  # noqa: B006 - typer copies it
    text_file: Annotated[Path | None, typer.Option("--text")] = None,
    chunk_tokens: Annotated[int, typer.Option(min=2)] = 2048,
    max_chunks: Annotated[int, typer.Option(min=1)] = 4,
    dtype: Annotated[
        Dtype,
        typer.Option(help="of the model; float32 is faster on CPUs without bf16"),
    ] = "bfloat16",
    threads: options.Threads = 1,
    json: options.Json = None,
) -> None:
    """Simulate codecs of the KV cache on a real model and a real text."""
    if unknown := [name for name in sets if name not in SETS]:
        raise typer.BadParameter(f"no set {unknown[0]!r}; there are: {', '.join(SETS)}")
    torch.set_num_threads(threads)
    logging.disable_progress_bar()
    path = str(resolve_model(model))
    tokenizer = text.load_tokenizer(path)
    source = text_file or default_text()
    cut = text.Cut(chunk_tokens, max_chunks=max_chunks)
    tokens = text.tokenize(text.read_text(source), tokenizer)
    chunks = text.cut_text(tokens, text.leading_tokens(tokenizer), cut)
    environment = _environment.describe(threads)
    _report.print_headline(environment)
    variants = [variant for name in sets for variant in SETS[name]]
    study = StudyModel(path, getattr(torch, dtype))
    found, plain, spreads = measure(study, chunks, cut.begin, variants)
    records = {v.name: summarize(v, found[v.name], plain) for v in variants}
    ppl = float(np.exp(np.mean(plain)))
    title = f"{model} in {dtype}, {source.name}: {len(chunks)} x {chunk_tokens}"
    title += f", PPL {ppl:.3f}"
    _report.console.print(_table(title, records))
    rms = np.mean(spreads, axis=0).round(4).tolist()
    _report.console.print(_rms_table(rms))
    record = {"benchmark": "codec", "environment": environment, "model": model}
    record |= {"dtype": dtype}
    record |= {"text": source.name, "chunks": len(chunks), "chunk_tokens": chunk_tokens}
    record |= {"ppl": ppl, "variants": records, "value_rms": rms}
    _report.write_json(json, record)


if __name__ == "__main__":
    typer.run(main)

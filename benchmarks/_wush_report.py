# SPDX-License-Identifier: Apache-2.0
"""Tables and a plot of `benchmarks.wush`."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks._wush_model import Variant
from polykv_vllm.calibrate.build import TRANSFORMS
from polykv_vllm.reference.lowbit import BITS, QUANTIZERS
from polykv_vllm.reporting.figure import DPI, STYLE
from polykv_vllm.reporting.table import Table

_COLUMNS = [(bits, quantizer) for bits in BITS for quantizer in QUANTIZERS]


def geometric_means(errors: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Return the geometric mean over layers of each variant's error."""
    return {name: float(np.exp(np.log(e).mean())) for name, e in errors.items()}


def error_table(means: Mapping[str, float]) -> Table:
    """Show errors by transform, a column for each quantizer and bit width."""
    columns = [f"{bits} bits {name}" for bits, name in _COLUMNS]
    table = Table(
        "error of a layer's attention output, geometric mean over layers",
        ["transform", *columns],
        legend="norm of the error over norm of the output, exact inputs, no windows",
    )
    for transform in TRANSFORMS:
        names = [Variant(transform, name, bits).name for bits, name in _COLUMNS]
        table.rows.append(
            [transform, *(f"{means[n]:.3f}" if n in means else "" for n in names)]
        )
    return table


def quality_table(record: Mapping[str, Any]) -> Table:
    """Show perplexity, divergence and agreement of each variant."""
    sink, recent, flush = record["settings"]["windows"]
    schedule = f"flushed by {flush}" if flush else "quantized on arrival"
    quality = record["quality"]
    chunks = max(map(len, quality.values()), default=0)
    table = Table(
        f"dPPL %, KLD, top-1 %: {chunks} chunk(s) of "
        f"{record['settings']['chunk_tokens']} tokens, second half scored, "
        f"sink {sink}, recent {recent}, {schedule}",
        ["transform", *(f"{bits} bits {name}" for bits, name in _COLUMNS)],
    )
    for transform in TRANSFORMS:
        names = [Variant(transform, name, bits).name for bits, name in _COLUMNS]
        table.rows.append([transform, *(_cell(quality.get(n)) for n in names)])
    return table


def _cell(chunks: Sequence[Mapping[str, float]] | None) -> str:
    if not chunks:
        return ""
    change = np.expm1(np.mean([each["nll"] - each["plain"] for each in chunks]))
    kld, top1 = (np.mean([each[n] for each in chunks]) for n in ("kld", "top1"))
    return f"{100 * change:+.1f}, {kld:.3f}, {100 * top1:.1f}"


def draw(errors: Mapping[str, Sequence[float]], path: Path) -> None:
    """Draw the error of each layer at the lowest bit width, a panel per quantizer."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    bits = min(int(name.rsplit("/", 1)[1]) for name in errors)
    with plt.rc_context(STYLE):
        figure, panels = plt.subplots(
            1, len(QUANTIZERS), figsize=(10, 4), sharey=True, layout="constrained"
        )
        for panel, quantizer in zip(panels, QUANTIZERS, strict=True):
            for transform in TRANSFORMS:
                values = errors.get(Variant(transform, quantizer, bits).name)
                if values is not None:
                    panel.plot(values, label=transform, linewidth=1.4)
            panel.set_title(f"{quantizer}, {bits} bits", loc="left")
            panel.set_xlabel("layer")
            panel.set_yscale("log")
        panels[0].set_ylabel("relative error of the attention output")
        panels[-1].legend(frameon=False, fontsize=8)
        figure.savefig(path, dpi=DPI)
        plt.close(figure)

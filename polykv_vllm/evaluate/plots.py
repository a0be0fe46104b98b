# SPDX-License-Identifier: Apache-2.0
"""Quality against bytes: one point for each arm, and the Pareto front."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from polykv_vllm.reporting.figure import spread_apart

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_OURS, _STOCK, _FRONT = "#c8501e", "#4c6a92", "#8c8c8c"
_LABEL_WIDTH = 0.28  # of the axes: points nearer than this share a column of labels
_LABEL_GAP = 0.052
_ROOM = 0.34  # to the right, for the last column


@dataclass(frozen=True)
class Point:
    """One arm.

    Attributes:
        arm: Its label.
        bytes_per_token: Of its cache.
        value: What it costs in quality; lower is better.
        low: Lower end of the interval, None without one.
        high: Upper end.

    """

    arm: str
    bytes_per_token: int
    value: float
    low: float | None = None
    high: float | None = None

    @property
    def is_ours(self) -> bool:
        """Whether one of our formats."""
        return self.arm.startswith("polykv")


def pareto_front(points: Sequence[Point], is_signed: bool = False) -> list[Point]:
    """Return the points that no other beats in both bytes and quality, by bytes.

    Args:
        points: Of all arms.
        is_signed: Values are differences from 0, better when nearer.

    """

    def cost(point: Point) -> float:
        return abs(point.value) if is_signed else point.value

    front: list[Point] = []
    for point in sorted(points, key=lambda p: (p.bytes_per_token, cost(p))):
        if not front or cost(point) < cost(front[-1]):
            front.append(point)
    return front


def draw_cost(
    points: Sequence[Point],
    stock_bytes: int | None,
    what: str,
    title: str,
    is_log: bool,
) -> Figure:
    """Draw what each arm costs in quality against its bytes per token.

    An arm that takes more bytes than 16 bits (fp32) is a line: a floor of noise.

    Args:
        points: Of all arms but the reference.
        stock_bytes: Per token in the reference's cache, for the words on the axis.
        what: On the vertical axis, with its unit.
        title: Model and text.
        is_log: Values are positive and span decades; else they are differences.

    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.2, 4.8), layout="constrained")
    axes = figure.subplots()
    floors = [p for p in points if stock_bytes and p.bytes_per_token > stock_bytes]
    dots = [p for p in points if p not in floors]
    if is_log and any(p.value > 0 for p in points):
        _scale_log(axes)
    if not is_log:
        axes.axhline(0, color="#333333", linewidth=0.8)
    _draw_dots(axes, dots, is_log)
    for floor in floors:
        axes.axhline(floor.value, color=_STOCK, linestyle=":", linewidth=1.2)
        below = not is_log and floor.value < 0  # the words stay clear of the zero line
        axes.annotate(
            f"{floor.arm}: noise of bf16 itself",
            (0.005, floor.value),
            xycoords=("axes fraction", "data"),
            xytext=(0, -3 if below else 3),
            va="top" if below else "bottom",
            textcoords="offset points",
            fontsize=8,
            color=_STOCK,
        )
    axes.set_xlabel(
        "cache bytes per token, all layers"
        + (f" (bf16: {stock_bytes:,})" if stock_bytes else "")
    )
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.set_ylabel(what)
    _label(figure, axes, dots)
    figure.suptitle(title, fontsize=11)
    return figure


def _draw_dots(axes: Axes, dots: Sequence[Point], is_log: bool) -> None:
    if not dots:
        return
    front = pareto_front(dots, is_signed=not is_log)
    axes.step(
        [p.bytes_per_token for p in front],
        [p.value for p in front],
        where="post",
        color=_FRONT,
        linewidth=1.2,
        linestyle="--",
        zorder=1,
    )
    for point in dots:
        axes.errorbar(
            point.bytes_per_token,
            point.value,
            yerr=_errors(point, is_log),
            marker="o",
            markersize=6,
            markerfacecolor=_color(point) if point in front else "white",
            color=_color(point),
            capsize=3,
            elinewidth=1,
            zorder=2,
        )
    sizes = [p.bytes_per_token for p in dots]
    width = max(max(sizes) - min(sizes), 0.1 * max(sizes))
    axes.set_xlim(min(sizes) - 0.06 * width, max(sizes) + _ROOM * width)
    axes.margins(y=0.12)


def _scale_log(axes: Axes) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter

    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(base=10, subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter(NullFormatter())


def _errors(point: Point, is_log: bool) -> list[list[float]] | None:
    if point.low is None or point.high is None:
        return None
    # A bar to zero has no end on a logarithmic axis.
    low = max(point.low, 0.01 * point.value) if is_log else point.low
    return [[max(point.value - low, 0.0)], [max(point.high - point.value, 0.0)]]


def _label(figure: Figure, axes: Axes, dots: Sequence[Point]) -> None:
    """Write names beside the points, moved apart where they would overlap."""
    figure.draw_without_rendering()  # settles the limits
    to_axes = axes.transData + axes.transAxes.inverted()
    places = {p: tuple(to_axes.transform((p.bytes_per_token, p.value))) for p in dots}
    columns: list[list[Point]] = []
    for point in sorted(dots, key=lambda p: places[p][0]):
        if columns and places[point][0] - places[columns[-1][-1]][0] < _LABEL_WIDTH:
            columns[-1].append(point)
        else:
            columns.append([point])
    for column in columns:
        column.sort(key=lambda p: places[p][1])
        right = max(places[p][0] for p in column) + 0.02
        heights = spread_apart([places[p][1] for p in column], _LABEL_GAP)
        for point, height in zip(column, heights, strict=True):
            axes.annotate(
                point.arm,
                places[point],
                xycoords="axes fraction",
                xytext=(right, height),
                textcoords="axes fraction",
                va="center",
                fontsize=8,
                color=_color(point),
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 1},
                arrowprops={
                    "arrowstyle": "-",
                    "color": "#b8b8b8",
                    "linewidth": 0.7,
                    "shrinkA": 0,
                    "shrinkB": 4,
                },
                zorder=3,
            )


def _color(point: Point) -> str:
    return _OURS if point.is_ours else _STOCK

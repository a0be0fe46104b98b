# SPDX-License-Identifier: Apache-2.0
"""The plots of a report, as PNG files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from polykv_vllm.bench.arms import BOUND, UNSHARED
from polykv_vllm.bench.measure import WARM
from polykv_vllm.bench.summary import CaseArm, Summary
from polykv_vllm.bench.tables import memory_agents, private_copy_bytes
from polykv_vllm.reporting.figure import DPI, STYLE, spread_apart

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

THROUGHPUT, MEMORY, CAPACITY = "throughput.png", "memory.png", "capacity.png"
_COLORS = {
    "stock": "#4c6a92",
    "stock-fp8": "#8aa6c8",
    "stock-avx512": "#7a7f87",
    BOUND: "#9a9a9a",
}
_OURS, _OURS_UNSHARED = ("#c8501e", "#7d3c98", "#2e7d4f"), "#e3a27f"


def draw_all(summary: Summary, output: Path) -> list[str]:
    """Draw every plot that there are figures for; return the file names."""
    import matplotlib

    matplotlib.use("agg")
    drawings = {
        THROUGHPUT: (any(summary.cases.values()), draw_throughput),
        MEMORY: (summary.memory, draw_memory),
        CAPACITY: (summary.distinct, draw_capacity),
    }
    names = []
    with matplotlib.rc_context(STYLE):
        for name, (has_figures, draw) in drawings.items():
            if has_figures:
                draw(summary).savefig(output / name, dpi=DPI, bbox_inches="tight")
                names.append(name)
    return names


def draw_throughput(summary: Summary) -> Figure:
    """Decode throughput: lines over agents, or bars where there is one number."""
    lengths = list(dict.fromkeys(r.shared_tokens for r in _rows(summary)))
    figure, panels = _figure(len(lengths), width=4.4 if len(lengths) > 1 else 6.4)
    for axes, length in zip(panels, lengths, strict=True):
        rows = [row for row in _rows(summary) if row.shared_tokens == length]
        if len({row.agents for row in rows}) == 1:
            _throughput_bars(axes, rows)
        else:
            _throughput_lines(axes, rows)
        axes.set_title(
            "agent prompts from files"
            if length is None
            else f"{length:,} shared tokens",
            fontsize=10,
        )
    figure.suptitle(
        f"Decode throughput of all agents, {summary.scenario.model}\n"
        f"prefix caching on in every arm, "
        f"{_count(summary.scenario.threads, 'compute thread')}; bound: attention "
        "that costs nothing",
        fontsize=11,
    )
    return figure


def _throughput_lines(axes: Axes, rows: list[CaseArm]) -> None:
    agents = sorted({row.agents for row in rows})
    ends = []
    for arm in dict.fromkeys(row.arm.name for row in rows):
        own = sorted((r for r in rows if r.arm.name == arm), key=lambda r: r.agents)
        spreads = [row.spread(WARM, "decode_tokens_per_s") for row in own]
        places = [agents.index(row.agents) for row in own]
        medians = [s.median for s in spreads]
        errors = [
            [s.median - s.low for s in spreads],
            [s.high - s.median for s in spreads],
        ]
        axes.errorbar(
            places,
            medians,
            yerr=errors,
            capsize=3,
            marker="o",
            markersize=4,
            linestyle="--" if arm == BOUND else "-",
            color=_color(arm, rows),
        )
        ends.append((places[-1], medians[-1], arm))
    axes.set_ylim(bottom=0)
    axes.set_xticks(range(len(agents)), map(str, agents))
    axes.set_xlim(-0.2, len(agents) - 1 + 0.1 + 0.45 * max(1, len(agents) - 1))
    axes.set_xlabel("agents at once")
    axes.set_ylabel("output tokens/s")
    _label_ends(axes, ends, rows)


def _label_ends(
    axes: Axes, ends: list[tuple[int, float, str]], rows: list[CaseArm]
) -> None:
    """Write each line's name at its end, moved apart where they would overlap."""
    gap = 0.062 * axes.get_ylim()[1]
    ends = sorted(ends, key=lambda end: end[1])
    heights = spread_apart([value for _, value, _ in ends], gap)
    for (place, _, arm), height in zip(ends, heights, strict=True):
        axes.annotate(
            arm,
            (place, height),
            xytext=(7, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
            color=_color(arm, rows),
        )


def _throughput_bars(axes: Axes, rows: list[CaseArm]) -> None:
    rows = list(reversed(rows))
    names = [r.arm.name for r in rows]
    spreads = [row.spread(WARM, "decode_tokens_per_s") for row in rows]
    bars = axes.barh(
        names,
        [s.median for s in spreads],
        color=[_color(row.arm.name, rows) for row in rows],
        xerr=[
            [s.median - s.low for s in spreads],
            [s.high - s.median for s in spreads],
        ],
        error_kw={"capsize": 3, "ecolor": "#333333", "elinewidth": 1},
        height=0.62,
    )
    for bar, row in zip(bars, rows, strict=True):
        if row.arm.is_bound:
            bar.set(facecolor="white", edgecolor=_COLORS[BOUND], hatch="///")
    widest = max(s.high for s in spreads)
    for place, each in enumerate(spreads):
        axes.text(each.high + 0.02 * widest, place, f"{each.median:.0f}", va="center")
    axes.set_xlim(0, 1.12 * widest)
    axes.grid(axis="x")
    axes.grid(False, axis="y")
    axes.set_xlabel(f"output tokens/s of {_count(rows[0].agents, 'agent')} together")


def draw_memory(summary: Summary) -> Figure:
    """Memory of one shared document against the number of agents."""
    figure, (axes,) = _figure(1, width=6.8)
    agents = memory_agents(summary)
    copy_bytes = private_copy_bytes(summary)
    if copy_bytes is not None:
        private = [copy_bytes * n / 2**20 for n in agents]
        axes.plot(agents, private, color="#8c8c8c", linestyle="--")
        _name(
            axes,
            agents[-1],
            private[-1],
            "private 16-bit\ncopies (computed)",
            "#6e6e6e",
        )
    for arms in _arms_of_equal_memory(summary):
        measured = summary.document_bytes(arms[0])
        numbers = sorted(measured)
        sizes = [measured[n] / 2**20 for n in numbers]
        color = _arm_color(arms[0], list(summary.memory))
        axes.plot(numbers, sizes, color=color, marker="o", markersize=4)
        names = ["vLLM's prefix cache" if arm == "stock" else arm for arm in arms]
        label = ",\n".join(names) + f": {sizes[-1]:.0f} MiB\n(measured)"
        _name(axes, numbers[-1], sizes[-1], label, color)
    tokens = next(iter(summary.memory.values()))["shared_tokens"]
    axes.set_title(
        f"Memory of one {tokens:,}-token document, {summary.scenario.model}",
        fontsize=11,
    )
    axes.set_xlabel("agents that read it at once")
    axes.set_ylabel("MiB")
    axes.set_yscale("log")
    axes.set_ylim(bottom=0.6 * axes.get_ylim()[0])
    axes.set_xlim(0.5, agents[-1] * 1.45)
    axes.set_xticks(agents)
    _plain_log_ticks(axes)
    return figure


def _arms_of_equal_memory(summary: Summary) -> list[list[str]]:
    """Return the arms of the memory figure; those on the same line are together."""
    lines: dict[tuple[float, ...], list[str]] = {}
    for arm in summary.memory:
        sizes = tuple(summary.document_bytes(arm).values())
        lines.setdefault(sizes, []).append(arm)
    return list(lines.values())


def _plain_log_ticks(axes: Axes) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axes.yaxis.set_major_locator(LogLocator(base=10, subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


def draw_capacity(summary: Summary) -> Figure:
    """Agents with documents of their own that run at the same time."""
    figure, (axes,) = _figure(1, width=6.4, height=2.6)
    arms = list(reversed(summary.distinct))
    counts = [summary.distinct[arm]["measured"] for arm in arms]
    colors = [_arm_color(arm, arms) for arm in arms]
    axes.barh(arms, counts, color=colors, height=0.6)
    for place, count in enumerate(counts):
        axes.text(count + 0.02 * max(counts), place, str(count), va="center")
    tokens = next(iter(summary.distinct.values()))["document_tokens"]
    axes.set_title(
        f"Agents with documents of their own ({tokens:,} tokens each)\n"
        f"in a cache of {summary.scenario.cache_mib:,} MiB, {summary.scenario.model}",
        fontsize=11,
    )
    axes.set_xlabel("largest number that ran at once without preemption (measured)")
    axes.set_xlim(0, 1.1 * max(counts))
    axes.grid(axis="x")
    axes.grid(False, axis="y")
    return figure


def _figure(panels: int, width: float, height: float = 3.8) -> tuple[Figure, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width * panels, height), layout="constrained")
    return figure, figure.subplots(1, panels, squeeze=False)[0]


def _rows(summary: Summary) -> list[CaseArm]:
    return [row for arms in summary.cases.values() for row in arms.values()]


def _color(arm: str, rows: list[CaseArm]) -> str:
    return _arm_color(arm, list(dict.fromkeys(row.arm.name for row in rows)))


def _arm_color(arm: str, arms: list[str]) -> str:
    if arm in _COLORS:
        return _COLORS[arm]
    if arm.endswith(UNSHARED):
        return _OURS_UNSHARED
    ours = sorted(a for a in arms if a not in _COLORS and not a.endswith(UNSHARED))
    return _OURS[ours.index(arm) % len(_OURS)]


def _name(axes: Axes, x: float, y: float, text: str, color: str) -> None:
    axes.annotate(
        text,
        (x, y),
        xytext=(8, 0),
        textcoords="offset points",
        va="center",
        fontsize=9,
        color=color,
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 1},
    )


def _count(number: int, word: str) -> str:
    return f"{number} {word}{'' if number == 1 else 's'}"

# SPDX-License-Identifier: Apache-2.0
"""The report's tables, once for the terminal and once as Markdown."""

from dataclasses import dataclass, field

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table as RichTable

from polykv_vllm.bench.arms import BOUND
from polykv_vllm.bench.figures import Spread
from polykv_vllm.bench.measure import COLD, WARM
from polykv_vllm.bench.scenario import Case
from polykv_vllm.bench.summary import CaseArm, Summary

BASELINES = ("stock", "stock-avx512")
NONE = "-"


@dataclass
class Table:
    """Rows of text; all columns but those of words are right-aligned.

    Attributes:
        title: Above the table.
        columns: Headings.
        rows: Cells.
        words: How many columns, from the left, hold words.
        legend: Below the table.
        groups: Row numbers before which a line is drawn.

    """

    title: str
    columns: list[str]
    words: int = 1
    rows: list[list[str]] = field(default_factory=list)
    legend: str = ""
    groups: set[int] = field(default_factory=set)

    def markdown(self) -> str:
        """Return the table as GitHub's Markdown."""
        marks = ["---" if n < self.words else "---:" for n in range(len(self.columns))]
        lines = [self.columns, marks, *self.rows]
        body = "\n".join(f"| {' | '.join(line)} |" for line in lines)
        legend = "".join(f"\n\n{line}" for line in self.legend.splitlines())
        return f"### {self.title}\n\n{body}{legend}\n"

    def print(self, console: Console) -> None:
        """Print the table."""
        table = RichTable(title=self.title, title_justify="left", box=box.ROUNDED)
        for number, heading in enumerate(self.columns):
            is_words = number < self.words
            table.add_column(
                heading, justify="left" if is_words else "right", no_wrap=is_words
            )
        for number, row in enumerate(self.rows):
            if number in self.groups:
                table.add_section()
            table.add_row(*map(escape, row))
        console.print(table)
        for line in self.legend.splitlines():
            console.print(f"[dim]{escape(line)}[/]", highlight=False)


def speed_table(summary: Summary) -> Table:
    """Throughput of all cases, beside each arm's ratio and the bound."""
    baselines = [b for b in BASELINES if any(b in a for a in summary.cases.values())]
    table = Table(
        "Throughput, warm prefix cache",
        ["agents", "shared", "arm", "decode tokens/s"],
        words=3,
    )
    for baseline in baselines:
        table.columns += [f"x {baseline}", "bound", "of the gain"]
    table.columns += ["output tokens/s", "hits"]
    for name, arms in summary.cases.items():
        table.groups.add(len(table.rows))
        for row in arms.values():
            cells = [*_case_cells(row), spread(row.spread(WARM, "decode_tokens_per_s"))]
            for baseline in baselines:
                cells += _ratio_cells(summary, name, row, baseline)
            cells.append(spread(row.spread(WARM, "output_tokens_per_s")))
            table.rows.append([*cells, f"{row.hit_rate(WARM):.1%}"])
    table.legend = (
        "decode: all agents together, while all of them generate; output: from the "
        "first request to the last token; median (range) of "
        f"{summary.scenario.repetitions} repetitions\n"
        "x: decode over that arm's; bound: the most that any attention could reach, "
        "measured with one that costs nothing; of the gain: saved part of the time "
        "between the two; hits: prompt tokens found in the prefix cache"
    )
    return table


def _case_cells(row: CaseArm) -> list[str]:
    shared = "prompts" if row.shared_tokens is None else f"{row.shared_tokens:,}"
    return [str(row.agents), shared, row.arm.name]


def _ratio_cells(summary: Summary, case: str, row: CaseArm, over: str) -> list[str]:
    """Return ratio, bound and share of the possible gain of one arm."""
    if row.arm.name == over:
        return [NONE] * 3
    ratio = summary.ratio(case, row.arm.name, over)
    cell = NONE if ratio is None else f"{ratio:.2f}x"
    if row.arm.name == BOUND:
        return [NONE, cell, NONE]
    bound = summary.ratio(case, BOUND, over)
    share = summary.possible(case, row.arm.name, over)
    return [
        cell,
        NONE if bound is None else f"{bound:.2f}x",
        NONE if share is None else f"{share:.0%}",
    ]


def requirements_table(summary: Summary) -> Table:
    """What the scenario requires of `polykv`, beside what was measured."""
    table = Table(
        "Requirements",
        ["polykv over", "figure", "required", "measured", "met"],
        words=2,
    )
    for bar in summary.scenario.bars:
        name = Case(bar.agents, bar.shared_tokens).name
        figure = f"decode, {bar.agents} agents, {bar.shared_tokens:,} shared"
        measured = summary.ratio(name, "polykv", bar.over)
        table.rows.append([bar.over, figure, *_verdict_cells(bar.at_least, measured)])
    wanted = summary.scenario.distinct
    if wanted is not None and wanted.at_least is not None:
        figure = f"agents, {wanted.document_tokens:,}-token documents of their own"
        measured = summary.distinct_ratio("polykv")
        table.rows.append(["stock", figure, *_verdict_cells(wanted.at_least, measured)])
    return table


def _verdict_cells(required: float, measured: float | None) -> list[str]:
    met = NONE if measured is None else "yes" if measured >= required else "NO"
    return [f"{required:.2f}x", ratio(measured), met]


def latency_table(summary: Summary) -> Table:
    """Times to the first token and between tokens."""
    table = Table(
        "Latency, ms",
        [
            "agents",
            "shared",
            "arm",
            "TTFT cold",
            "hits cold",
            "TTFT warm",
            "hits warm",
            "ITL p50 / p90 / p99",
            "TPOT p50 / p90 / p99",
        ],
        words=3,
    )
    for arms in summary.cases.values():
        table.groups.add(len(table.rows))
        for row in arms.values():
            cells = _case_cells(row)
            for phase in (COLD, WARM):
                cells.append(spread(row.spread(phase, "ttft_ms")))
                cells.append(f"{row.hit_rate(phase):.1%}")
            for figure in ("itl_ms", "tpot_ms"):
                values = row.percentiles(WARM, figure).values()
                cells.append(" / ".join(map(number, values)))
            table.rows.append(cells)
    table.legend = (
        "TTFT: time to the first token, median of the agents, all of whom ask at once; "
        "ITL: between two tokens; TPOT: mean per token after the first; warm"
    )
    return table


def capacity_table(summary: Summary) -> Table:
    """What the same bytes hold."""
    tokens = summary.scenario.distinct
    documents = f"{tokens.document_tokens:,}-token" if tokens else ""
    shared = max(summary.scenario.shared_tokens, default=0)
    table = Table(
        f"Cache of {summary.scenario.cache_mib:,} MiB",
        ["arm", "bytes/token", "tokens", "x stock"],
    )
    if shared:
        table.columns.append(f"{shared:,}-token prefixes/GiB")
    if tokens:
        table.columns += [f"agents, {documents} documents", "measured", "x stock"]
    stock = summary.caches.get("stock")
    for arm, cache in summary.caches.items():
        if arm == BOUND:
            continue
        capacity = cache["capacity_tokens"]
        gain = capacity / stock["capacity_tokens"] if stock else None
        cells = [arm, f"{cache['token_bytes']:,.0f}", f"{capacity:,}", ratio(gain)]
        if shared:
            cells.append(f"{summary.resident_prefixes(arm, shared):,}")
        if tokens:
            cells += _distinct_cells(summary, arm)
        table.rows.append(cells)
    table.legend = "tokens: what the engine reports; prefixes: computed from it"
    if tokens:
        table.legend += (
            "\nagents: with documents of their own, all running at once without "
            "preemption; computed from the blocks, then tried with one agent more"
        )
    return table


def _distinct_cells(summary: Summary, arm: str) -> list[str]:
    if (figures := summary.distinct.get(arm)) is None:
        return [NONE] * 3
    gain = summary.distinct_ratio(arm)
    return [str(figures["computed"]), str(figures["measured"]), ratio(gain)]


def memory_table(summary: Summary) -> Table:
    """Memory of one shared document by number of agents."""
    tokens = next(iter(summary.memory.values()))["shared_tokens"]
    table = Table(
        f"Memory of one {tokens:,}-token document, MiB",
        ["agents", "private 16-bit copies (computed)"],
        words=0,
    )
    table.columns += [f"{arm} (measured)" for arm in summary.memory]
    copy_bytes = private_copy_bytes(summary)
    for agents in memory_agents(summary):
        private = NONE if copy_bytes is None else mib(copy_bytes * agents)
        measured = [
            mib(sizes[agents]) if agents in sizes else NONE
            for sizes in map(summary.document_bytes, summary.memory)
        ]
        table.rows.append([str(agents), private, *measured])
    table.legend = (
        "measured: blocks that the engine holds while the agents run, less one block "
        "for each agent's own tokens and answer"
    )
    return table


def private_copy_bytes(summary: Summary) -> float | None:
    """Return the size of one 16-bit copy of the memory figure's document."""
    stock = summary.caches.get("stock")
    if stock is None:
        return None
    tokens = next(iter(summary.memory.values()))["shared_tokens"]
    return float(stock["token_bytes"] * tokens)


def memory_agents(summary: Summary) -> list[int]:
    """Return the numbers of agents that were measured in any arm."""
    return sorted({n for arm in summary.memory for n in summary.document_bytes(arm)})


def all_tables(summary: Summary) -> list[Table]:
    """Return every table that has rows."""
    tables = []
    if any(summary.cases.values()):
        tables += [speed_table(summary), latency_table(summary)]
    if (requirements := requirements_table(summary)).rows:
        tables.append(requirements)
    if summary.caches:
        tables.append(capacity_table(summary))
    if summary.memory:
        tables.append(memory_table(summary))
    return tables


def spread(values: Spread) -> str:
    """Return e.g. `114 (112-117)`."""
    return f"{number(values.median)} ({number(values.low)}-{number(values.high)})"


def number(value: float) -> str:
    """Return three significant digits."""
    digits = 2 if value < 10 else 1 if value < 100 else 0
    return f"{value:,.{digits}f}"


def ratio(value: float | None) -> str:
    """Return e.g. `2.78x`."""
    return NONE if value is None else f"{value:.2f}x"


def mib(value: float) -> str:
    """Return bytes as MiB."""
    return f"{value / 2**20:,.1f}"

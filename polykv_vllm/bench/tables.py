# SPDX-License-Identifier: Apache-2.0
"""The report's tables, once for the terminal and once as Markdown."""

from polykv_vllm.bench.arms import BOUND
from polykv_vllm.bench.figures import Spread
from polykv_vllm.bench.measure import COLD, WARM
from polykv_vllm.bench.scenario import Case
from polykv_vllm.bench.summary import CaseArm, Summary
from polykv_vllm.reporting.table import Table

BASELINES = ("stock", "stock-avx512")
NONE = "-"
CASE = "agents x shared"


def speed_table(summary: Summary) -> Table:
    """Decode throughput of all cases, beside each arm's ratio the bound."""
    baselines = [b for b in BASELINES if any(b in a for a in summary.cases.values())]
    table = Table("Decode throughput, warm prefix cache", [CASE, "arm", "tokens/s"], 2)
    table.columns += [*(f"x {baseline} (bound)" for baseline in baselines), "shared"]
    table.columns.append("hits")
    for name, arms in summary.cases.items():
        table.groups.add(len(table.rows))
        for row in arms.values():
            table.rows.append(
                [
                    *_case_cells(table, row),
                    spread(row.spread(WARM, "decode_tokens_per_s")),
                    *(_ratio_cell(summary, name, row, over) for over in baselines),
                    share(row.shared_rate()),
                    f"{row.hit_rate(WARM):.1%}",
                ]
            )
    table.legend = (
        "tokens/s: all agents together, while all of them generate; median (range) of "
        f"{summary.scenario.repetitions} repetitions\n"
        "bound: the ratio with an attention that costs nothing, measured\n"
        "shared: attended tokens, prefill included, read once for several agents\n"
        "hits: prompt tokens that came from the prefix cache"
    )
    return table


def _case_cells(table: Table, row: CaseArm) -> list[str]:
    """Return the cells of case and arm; the case stands in its first row only."""
    shared = "prompts" if row.shared_tokens is None else f"{row.shared_tokens:,}"
    is_first = len(table.rows) in table.groups
    return [f"{row.agents} x {shared}" if is_first else "", row.arm.name]


def _ratio_cell(summary: Summary, case: str, row: CaseArm, over: str) -> str:
    if row.arm.name == over:
        return NONE
    cell = ratio(summary.ratio(case, row.arm.name, over))
    bound = summary.ratio(case, BOUND, over)
    return cell if bound is None or row.arm.is_bound else f"{cell} ({bound:.2f}x)"


def first_token_table(summary: Summary) -> Table:
    """Times to the first token, cold and warm, and what came per second in all."""
    table = Table("First token", [CASE, "arm"], 2)
    table.columns += ["cold s", "hits", "warm s", "hits", "tokens/s"]
    for arms in summary.cases.values():
        table.groups.add(len(table.rows))
        for row in arms.values():
            cells = _case_cells(table, row)
            for phase in (COLD, WARM):
                cells.append(spread(row.spread(phase, "ttft_ms"), 1e-3))
                cells.append(f"{row.hit_rate(phase):.1%}")
            cells.append(spread(row.spread(WARM, "output_tokens_per_s")))
            table.rows.append(cells)
    table.legend = (
        "cold, warm: time to the first token (TTFT), median of the agents, all of whom "
        "ask at once\n"
        "tokens/s: from the first request to the last token, warm"
    )
    return table


def token_table(summary: Summary) -> Table:
    """Times between tokens."""
    table = Table("Next tokens, warm prefix cache, ms", [CASE, "arm"], 2)
    table.columns += ["ITL p50", "p90", "p99", "TPOT p50", "p90", "p99", "hits"]
    for arms in summary.cases.values():
        table.groups.add(len(table.rows))
        for row in arms.values():
            cells = _case_cells(table, row)
            for figure in ("itl_ms", "tpot_ms"):
                cells += map(number, row.percentiles(WARM, figure).values())
            table.rows.append([*cells, f"{row.hit_rate(WARM):.1%}"])
    table.legend = (
        "ITL: between two tokens, over all tokens; TPOT: mean of a request's tokens "
        "after the first, over all agents; medians of the repetitions"
    )
    return table


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


def capacity_table(summary: Summary) -> Table:
    """What the same bytes hold."""
    tokens = summary.scenario.distinct
    shared = max(summary.scenario.shared_tokens, default=0)
    table = Table(
        f"Cache of {summary.scenario.cache_mib:,} MiB",
        ["arm", "B/token", "tokens", "x stock"],
    )
    if shared:
        table.columns.append("prefixes/GiB")
    if tokens:
        table.columns += ["agents", "measured", "x stock"]
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
    table.legend = "tokens: what the engine reports"
    if shared:
        table.legend += f"\nprefixes: of {shared:,} tokens, whole blocks, computed"
    if tokens:
        table.legend += (
            f"\nagents: with {tokens.document_tokens:,}-token documents of their own, "
            "all running at once without preemption; computed from the blocks, then "
            "measured, with one agent more, too"
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
        ["agents", "private copies (computed)"],
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
        "private copies: 16 bits, one for each agent\n"
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
        tables += [speed_table(summary)]
        tables += [first_token_table(summary), token_table(summary)]
    if (requirements := requirements_table(summary)).rows:
        tables.append(requirements)
    if summary.caches:
        tables.append(capacity_table(summary))
    if summary.memory:
        tables.append(memory_table(summary))
    return tables


def spread(values: Spread, factor: float = 1.0) -> str:
    """Return e.g. `114 (112-117)`, times `factor`; one number if there is no range."""
    median, low, high = (
        number(factor * value) for value in (values.median, values.low, values.high)
    )
    return median if low == high else f"{median} ({low}-{high})"


def number(value: float) -> str:
    """Return three significant digits."""
    digits = 2 if value < 10 else 1 if value < 100 else 0
    return f"{value:,.{digits}f}"


def ratio(value: float | None) -> str:
    """Return e.g. `2.78x`."""
    return NONE if value is None else f"{value:.2f}x"


def share(value: float | None) -> str:
    """Return e.g. `93.1%`."""
    return NONE if value is None else f"{value:.1%}"


def mib(value: float) -> str:
    """Return bytes as MiB."""
    return f"{value / 2**20:,.1f}"

# SPDX-License-Identifier: Apache-2.0
"""`polykv bench`: the benchmark's command line."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from polykv_vllm.cli.common import Fresh, ReportOnly, Threads, fail, table_console
from polykv_vllm.server import STARTUP_TIMEOUT_S

bench = typer.Typer(
    help="Servers side by side, driven by vLLM's own benchmark client.",
    no_args_is_help=True,
)


@bench.callback()
def _bench() -> None:
    pass


@bench.command()
def agents(
    scenario: Annotated[
        str, typer.Argument(help="A name that --list shows, or a YAML file.")
    ] = "decisive",
    quick: Annotated[
        bool, typer.Option("--quick", help="The scenario quick: within 10 minutes.")
    ] = False,
    show_list: Annotated[
        bool, typer.Option("--list", help="List scenarios and arms, and exit.")
    ] = False,
    model: Annotated[
        str | None, typer.Option(help="Model instead of the scenario's.")
    ] = None,
    arm: Annotated[
        list[str] | None, typer.Option(help="Only these arms; repeatable.")
    ] = None,
    repetitions: Annotated[int | None, typer.Option(min=1)] = None,
    cache_mib: Annotated[
        int | None, typer.Option(help="--kv-cache-memory-bytes, MiB.", min=1)
    ] = None,
    threads: Threads = None,
    prompts_dir: Annotated[
        Path | None,
        typer.Option(help="Folder of agent prompts instead of synthetic ones."),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(help="Folder for results; default bench-results/SCENARIO."),
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(help="Port of the first server; default: free ones.", min=1),
    ] = None,
    startup_timeout: Annotated[
        float, typer.Option(help="Seconds until a server must answer.", min=1)
    ] = STARTUP_TIMEOUT_S,
    fresh: Fresh = False,
    report_only: ReportOnly = False,
) -> None:
    """Many agents behind one system prompt: vLLM's caches beside polykv's.

    Runs are kept as they finish: the same command goes on where it was interrupted.
    Servers are stopped at the end, on failure and on Ctrl-C. Exits with 1 when a run
    failed or its figures must not be compared.
    """
    from polykv_vllm.bench.agents import AgentsOptions, run_agents
    from polykv_vllm.bench.errors import BenchError
    from polykv_vllm.models import ModelBuildError

    console = table_console()
    if show_list:
        _print_list(console)
        return
    given: dict[str, Any] = {
        "model": model,
        "arms": arm or None,
        "repetitions": repetitions,
        "cache_mib": cache_mib,
        "threads": threads,
    }
    if prompts_dir is not None:
        given |= {"prompts_dir": prompts_dir.absolute(), "shared_tokens": []}
        given |= {"groups": 1, "bars": []}
    options = AgentsOptions(
        scenario="quick" if quick else scenario,
        overrides={key: value for key, value in given.items() if value is not None},
        output=output,
        port=port,
        fresh=fresh,
        report_only=report_only,
        startup_timeout_s=startup_timeout,
    )
    try:
        is_good = run_agents(options, console)
    except (BenchError, ModelBuildError) as error:
        raise fail(error) from None
    except KeyboardInterrupt:
        console.print("interrupted: finished runs are kept, the same command goes on")
        raise typer.Exit(130) from None
    if not is_good:
        raise typer.Exit(1)


def _print_list(console: Console) -> None:
    from rich.table import Table

    from polykv_vllm.bench.arms import ARMS
    from polykv_vllm.bench.scenario import shipped

    lists = {
        "scenario": shipped(),
        "arm": {name: arm.about for name, arm in ARMS.items()},
    }
    for heading, entries in lists.items():
        table = Table(heading, "", box=None, padding=(0, 2))
        for name, about in entries.items():
            table.add_row(name, escape(about), style=None)
        console.print(table)
        console.print()

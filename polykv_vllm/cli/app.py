# SPDX-License-Identifier: Apache-2.0
"""Commands and their options. What they do is imported when they run.

`polykv --help` must not wait for torch and vLLM.
"""

import os
from typing import Annotated

import typer
from rich.console import Console

from polykv_vllm import __version__
from polykv_vllm.cli.bench import bench
from polykv_vllm.cli.calibrate import calibrate
from polykv_vllm.cli.common import fail
from polykv_vllm.cli.evaluate import evaluate
from polykv_vllm.cli.pool import pool
from polykv_vllm.formats import CACHE_DTYPES
from polykv_vllm.models import DEFAULT_MODEL, MODELS

app = typer.Typer(
    name="polykv",
    help="A compressed KV cache for vLLM. Serve with: "
    "vllm serve MODEL --kv-cache-dtype polykv",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

app.add_typer(bench, name="bench")
app.add_typer(pool, name="pool")
app.command("eval")(evaluate)
app.command("calibrate")(calibrate)

KVCacheDtype = Annotated[
    str,
    typer.Option(
        "--kv-cache-dtype", metavar="DTYPE", help=f"One of {', '.join(CACHE_DTYPES)}."
    ),
]


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"polykv-vllm {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print and exit."
        ),
    ] = False,
) -> None:
    pass


@app.command()
def info() -> None:
    """Show versions, the instruction set in use, formats and seams."""
    from polykv_vllm.cli.info import print_info

    # This process only looks: vLLM's notes on what it could serve are noise here.
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    print_info(Console())


@app.command()
def check(
    model: Annotated[
        str,
        typer.Argument(help="A directory, a hub name, or a name of `polykv model`."),
    ],
    kv_cache_dtype: KVCacheDtype = "polykv",
    memory_gib: Annotated[
        float, typer.Option(help="Cache size to count tokens for.", min=0.001)
    ] = 1.0,
    windows: Annotated[
        str | None,
        typer.Option(
            metavar="FIRST/LAST",
            help="Count windows of full precision too, as in 64/256.",
        ),
    ] = None,
) -> None:
    """Say whether a model can be served compressed, and what that saves.

    Reads only the model's config. Exits with 1 and the reason when it cannot.
    """
    from polykv_vllm.cli.check import CheckError, print_check, run_check
    from polykv_vllm.windows.sizes import WindowError, WindowSizes

    try:
        sizes = None if windows is None else WindowSizes.parse(windows)
        support = run_check(model, kv_cache_dtype)
    except (CheckError, WindowError) as error:
        raise fail(error) from None
    print_check(Console(), model, support, memory_gib, sizes)


@app.command()
def model(
    name: Annotated[str, typer.Argument(help=f"One of {', '.join(MODELS)}.")],
) -> None:
    """Print the directory of a small real model; build it first if needed."""
    from polykv_vllm.models import ModelBuildError, build_model

    progress = Console(stderr=True)
    try:
        path = build_model(name, lambda step: progress.print(step, highlight=False))
    except (ValueError, ModelBuildError) as error:
        raise fail(error) from None
    print(path)


@app.command()
def demo(
    model: Annotated[str, typer.Option(help="Model to serve.")] = DEFAULT_MODEL,
    kv_cache_dtype: KVCacheDtype = "polykv",
    max_tokens: Annotated[int, typer.Option(help="Longest answer.", min=1)] = 48,
    compare: Annotated[
        bool, typer.Option("--compare", help="Serve with vLLM's own dtype, too.")
    ] = False,
) -> None:
    """Serve a small model with a compressed cache to 8 agents, and measure.

    The agents share a long system prompt; their second wave finds it in the prefix
    cache. The server is stopped at the end, on failure and on Ctrl-C.
    """
    from polykv_vllm.cli.check import CheckError
    from polykv_vllm.demo.run import DemoOptions, run_demo
    from polykv_vllm.models import ModelBuildError
    from polykv_vllm.server import ServerError

    options = DemoOptions(model, kv_cache_dtype, max_tokens, compare)
    try:
        run_demo(options, Console())
    except (CheckError, ModelBuildError, ServerError) as error:
        raise fail(error) from None


def main() -> None:
    """Entry point of the `polykv` script."""
    app()

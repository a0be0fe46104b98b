# SPDX-License-Identifier: Apache-2.0
"""The demo: a real server, eight agents, one shared system prompt."""

from dataclasses import dataclass
from importlib.resources import as_file, files
from pathlib import Path

from rich.console import Console

from polykv_vllm import envs
from polykv_vllm.capacity import capacity_tokens
from polykv_vllm.cli.check import run_check
from polykv_vllm.demo import display
from polykv_vllm.demo.agents import Agent, next_wave, open_conversations, run_wave
from polykv_vllm.demo.result import Arm, CacheFigures, WaveFigures
from polykv_vllm.demo.scenario import load_scenario
from polykv_vllm.formats import is_polykv_dtype
from polykv_vllm.models import DEFAULT_MODEL, resolve_model
from polykv_vllm.process import signals_unwind
from polykv_vllm.scrape import CacheReport, cache_report, prefix_counters
from polykv_vllm.server import ServerError, VllmServer
from polykv_vllm.support import Support

MODEL_NAME = "demo"
STOCK_DTYPE = "bfloat16"
NUM_WAVES = 2


@dataclass(frozen=True)
class DemoOptions:
    """What the command line may change.

    Attributes:
        model: Catalogue name, path or hub name.
        kv_cache_dtype: Of the compressed arm.
        max_tokens: Longest answer.
        compare: Serve with vLLM's own dtype first and report both as measured.

    """

    model: str = DEFAULT_MODEL
    kv_cache_dtype: str = "polykv"
    max_tokens: int = 48
    compare: bool = False


def run_demo(options: DemoOptions, console: Console) -> None:
    """Build the model, serve it, run two waves of requests, print the figures.

    Raises:
        ModelBuildError: The model could not be built.
        CheckError: The model cannot be served with that dtype.
        ServerError: `vllm serve` did not start, or a request failed. Its processes
            have ended by then.

    """
    with signals_unwind():
        _run_demo(options, console)


def _run_demo(options: DemoOptions, console: Console) -> None:
    with display.step(console, f"model {options.model}") as view:
        model = resolve_model(options.model, view.update)
        support = run_check(model, options.kv_cache_dtype)
    dtypes = [STOCK_DTYPE] if options.compare else []
    arms = [
        _serve(model, support, dtype, options.max_tokens, console)
        for dtype in (*dtypes, options.kv_cache_dtype)
    ]
    if options.compare:
        stock = arms[0].cache
    else:
        stock = _computed_stock(support, arms[0].cache)
    display.print_result(console, stock, arms)
    if options.model == DEFAULT_MODEL:
        console.print(f"[dim]{DEFAULT_MODEL} is tiny: it errs with any cache[/]")


def _serve(
    model: str, support: Support, dtype: str, max_tokens: int, console: Console
) -> Arm:
    """Run all waves on a server with the cache dtype `dtype`."""
    log_path = _log_path(dtype)
    agents = open_conversations(load_scenario())
    with as_file(files("polykv_vllm.demo") / "data" / "serve.yaml") as config:
        arguments = [model, "--config", str(config), "--kv-cache-dtype", dtype]
        arguments += ["--served-model-name", MODEL_NAME]
        with VllmServer(arguments, log_path) as server:
            with display.step(console, f"vllm serve --kv-cache-dtype {dtype}") as view:
                server.wait_until_healthy(view.update)
            report = cache_report(server.metrics())
            waves = tuple(
                _wave(server, agents, number, max_tokens, console)
                for number in range(NUM_WAVES)
            )
    return Arm(_reported(support, dtype, report), waves)


def _wave(
    server: VllmServer,
    agents: list[Agent],
    number: int,
    max_tokens: int,
    console: Console,
) -> WaveFigures:
    """Send one turn of every agent; show and print the answers."""
    wave = next_wave(agents, number)
    title = f"wave {number + 1}: {len(agents)} agents at once"
    before = prefix_counters(server.metrics())
    with display.live_wave(console, wave, title):
        try:
            run_wave(wave, agents, server.base_url, MODEL_NAME, max_tokens)
        except ExceptionGroup as errors:
            first = errors.exceptions[0]
            raise ServerError(
                f"{len(errors.exceptions)} request(s) failed, the first with "
                f"{first!r}; the server's log ends with:\n{server.log_tail()}"
            ) from errors
    prefix = prefix_counters(server.metrics()) - before
    display.print_answers(console, wave, title)
    return WaveFigures.of(wave, prefix)


def _reported(support: Support, dtype: str, report: CacheReport) -> CacheFigures:
    ours = is_polykv_dtype(dtype)
    return CacheFigures(
        dtype=dtype,
        memory_bytes=report.memory_bytes,
        block_size=report.block_size,
        token_bytes=(
            support.bytes_per_token if ours else support.uncompressed_bytes_per_token()
        ),
        capacity_tokens=report.capacity_tokens,
        source=f"{dtype}: reported by the running engine",
    )


def _computed_stock(support: Support, like: CacheFigures) -> CacheFigures:
    """Return vLLM's own cache in the memory and with the blocks of `like`."""
    token_bytes = support.uncompressed_bytes_per_token()
    return CacheFigures(
        dtype=STOCK_DTYPE,
        memory_bytes=like.memory_bytes,
        block_size=like.block_size,
        token_bytes=token_bytes,
        capacity_tokens=capacity_tokens(
            like.memory_bytes, token_bytes, like.block_size
        ),
        source=f"{STOCK_DTYPE}: computed from the config; --compare measures it",
    )


def _log_path(dtype: str) -> Path:
    directory = envs.cache_dir() / "logs"
    directory.mkdir(parents=True, exist_ok=True)
    return directory / f"demo-{dtype}.log"

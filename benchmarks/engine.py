# SPDX-License-Identifier: Apache-2.0
"""What does the compressed cache change in the whole engine?

    python -m benchmarks.engine

One request at a time on the real engine: prefill time, decode rate, capacity of the
cache, time for storing, and the worker's memory over growing contexts; beside vLLM's
own bf16 cache, alternating, every arm in processes of its own.
"""

from contextlib import ExitStack
from typing import Annotated, Any

import typer
from rich.table import Table

from benchmarks import _environment, _report
from benchmarks import _options as options
from benchmarks._engine_rounds import (
    CachedPromptError,
    Rounds,
    alternate_rounds,
    peak_memory,
    store_share,
)
from benchmarks._engine_session import (
    EngineError,
    EngineSession,
    Worker,
    WorkerWithoutAmx,
    engine_session,
)

SPEED_RATIO = 1.2
CAPACITY_RATIO = 2.75
STORE_SHARE = 0.03
CHUNK_TOKENS = 2048
MAX_MODEL_LEN = 8192
NEW_TOKENS = 64
MEMORY_CONTEXTS = (2048, 4096, 6144)
"""Whole chunks only: a shorter last chunk moves the peak by 15 MiB in any arm, because
its activations do not fit where the previous chunk's were."""
MEMORY_NOISE_BYTES = 1 << 20
"""Growth that counts as none; one layer's 4,096 tokens in bf16, the least that a buffer
of the context's size would add, are 3 MiB in the default model."""
STOCK, STOCK_WITHOUT_AMX = "stock", "stock, no AMX"


def llm_options(model: str, cache_bytes: int, eager: bool) -> dict[str, Any]:
    """Return the options of `vllm.LLM` that all arms share."""
    return {
        "model": model,
        "dtype": "bfloat16",
        "enforce_eager": eager,
        "max_model_len": MAX_MODEL_LEN,
        "max_num_batched_tokens": CHUNK_TOKENS,
        "kv_cache_memory_bytes": cache_bytes,
        "worker_extension_cls": Worker,
    }


def arm_options(
    shared: dict[str, Any], dtype: str, without_amx: bool
) -> dict[str, dict[str, Any]]:
    """Return {arm: options}; vLLM's own come first.

    Args:
        shared: From `llm_options`.
        dtype: Cache dtype of our arm, which takes its name.
        without_amx: Add vLLM with its attention on the AVX-512 path.

    """
    arms = {STOCK: {**shared, "kv_cache_dtype": "auto"}}
    if without_amx:
        arms[STOCK_WITHOUT_AMX] = {
            **arms[STOCK],
            "worker_extension_cls": WorkerWithoutAmx,
        }
    arms[dtype] = {**shared, "kv_cache_dtype": dtype}
    return arms


def speed_table(
    results: dict[str, Rounds], sessions: dict[str, EngineSession], ours: str
) -> Table:
    """Lay out prefill, decode and capacity; ratios are ours over the row's arm."""
    table = Table(title=f"ratios: {ours} against the arm of the row")
    for column in ("arm", "attention"):
        table.add_column(column)
    for column in (
        "prefill s",
        f"ratio >= {SPEED_RATIO}",
        "decode tokens/s",
        f"ratio >= {SPEED_RATIO}",
        "capacity tokens",
        f"ratio >= {CAPACITY_RATIO}",
    ):
        table.add_column(column, justify="right")
    our_prefill, our_decode = results[ours].medians()
    our_capacity = sessions[ours].facts["capacity_tokens"]
    for name, rounds in results.items():
        facts = sessions[name].facts
        prefill, decode = rounds.medians()
        ratios = ["", "", ""]
        if name != ours:
            ratios = [
                _report.ratio(prefill / our_prefill, SPEED_RATIO),
                _report.ratio(our_decode / decode, SPEED_RATIO),
                _report.ratio(our_capacity / facts["capacity_tokens"], CAPACITY_RATIO),
            ]
        prefill_cell = f"{prefill:.2f} ({_range(rounds.prefill_s, 2)})"
        decode_cell = f"{decode:.1f} ({_range(rounds.decode_tokens_per_s, 1)})"
        values = [prefill_cell, decode_cell, f"{facts['capacity_tokens']:,}"]
        pairs = [cell for pair in zip(values, ratios, strict=True) for cell in pair]
        table.add_row(name, facts["attention"], *pairs)
    return table


def _range(values: list[float], digits: int) -> str:
    return f"{min(values):.{digits}f}-{max(values):.{digits}f}"


def store_table(shares: dict[str, dict[str, float]], ours: str) -> Table:
    """Lay out the time for storing K and V, within the engine."""
    table = Table(
        title=f"storing K and V in the prefill of {CHUNK_TOKENS} tokens, {ours}: at "
        f"most {_report.share(STORE_SHARE)}"
    )
    table.add_column("arm")
    for column in ("store ms, all layers", "prefill ms", "share"):
        table.add_column(column, justify="right")
    for name, values in shares.items():
        table.add_row(
            name,
            _report.milliseconds(values["store_s"]),
            _report.milliseconds(values["prefill_s"]),
            _report.share(values["share"], STORE_SHARE if name == ours else None),
        )
    return table


def memory_table(peaks: dict[str, dict[int, int]]) -> Table:
    """Lay out the worker's peak memory by context."""
    table = Table(title="peak resident MiB of the worker, cache included")
    table.add_column("arm")
    contexts = list(next(iter(peaks.values())))
    for context in contexts:
        table.add_column(f"{context:,} tokens", justify="right")
    table.add_column("growth", justify="right")
    for name, values in peaks.items():
        cells = [f"{values[context] / 2**20:,.1f}" for context in contexts]
        growth = memory_growth(values)
        color = "green" if growth <= MEMORY_NOISE_BYTES else "red"
        table.add_row(name, *cells, f"[{color}]{growth / 2**20:+.1f}[/]")
    return table


def memory_growth(peaks: dict[int, int]) -> int:
    """Return the bytes by which the longest context exceeds the shortest."""
    return peaks[max(peaks)] - peaks[min(peaks)]


def start(
    stack: ExitStack, arms: dict[str, dict[str, Any]], threads: int
) -> dict[str, EngineSession]:
    """Start the arms one after the other."""
    sessions = {}
    for name, llm in arms.items():
        with _report.console.status(f"starting engine: {name}"):
            session = engine_session(name, llm, threads)
            sessions[name] = stack.enter_context(session)
    return sessions


def measure_all(
    sessions: dict[str, EngineSession],
    ours: str,
    record: dict[str, Any],
    rounds: int,
    memory: bool,
) -> None:
    """Measure and print everything; add the figures to `record`."""
    console = _report.console
    console.print(
        f"{record['model']}, prompt {record['prompt_tokens']}, {NEW_TOKENS} new "
        f"tokens, one request, prefix cache empty, {rounds} alternating rounds, "
        "medians (range)"
    )
    with console.status("prefill and decode"):
        results = alternate_rounds(
            sessions, record["prompt_tokens"], NEW_TOKENS, rounds
        )
    console.print(speed_table(results, sessions, ours))
    record["arms"] = {
        name: {**sessions[name].facts, **result.as_dict()}
        for name, result in results.items()
    }
    pair = {STOCK: sessions[STOCK], ours: sessions[ours]}
    if memory:
        with console.status("memory over growing contexts"):
            peaks = {n: peak_memory(s, MEMORY_CONTEXTS) for n, s in pair.items()}
        console.print(memory_table(peaks))
        record["peak_bytes"] = peaks
    with console.status("storing"):
        shares = {n: store_share(s, CHUNK_TOKENS, rounds) for n, s in pair.items()}
    console.print(store_table(shares, ours))
    record["store"] = shares


def main(
    dtype: options.Format = "polykv",
    model: Annotated[
        str, typer.Option(help="catalogue name or directory")
    ] = "smollm2-135m-instruct",
    prompt_tokens: Annotated[int, typer.Option(help="length of the prompt")] = 3072,
    rounds: Annotated[int, typer.Option(help="measured rounds of every arm")] = 5,
    threads: options.Threads = 1,
    cache_mib: Annotated[int, typer.Option(help="--kv-cache-memory-bytes")] = 1024,
    without_amx: Annotated[
        bool, typer.Option(help="also vLLM with its attention kept on AVX-512")
    ] = True,
    eager: Annotated[bool, typer.Option(help="--enforce-eager")] = True,
    memory: Annotated[bool, typer.Option(help="measure memory, about 2 min")] = True,
    json: options.Json = None,
) -> None:
    """The real engine with polykv beside the same engine with its own cache."""
    from polykv_vllm.models import resolve_model

    options.read_options(dtype, [])
    environment = _environment.describe(threads)
    _report.print_headline(environment)
    shared = llm_options(resolve_model(model), cache_mib << 20, eager)
    has_amx = "amx_bf16" in environment["cpu_flags"]
    arms = arm_options(shared, dtype, without_amx and has_amx)
    record: dict[str, Any] = {
        "benchmark": "engine",
        "environment": environment,
        "model": model,
        "options": {key: shared[key] for key in shared if key != "model"},
        "prompt_tokens": prompt_tokens,
        "new_tokens": NEW_TOKENS,
    }
    try:
        with ExitStack() as stack:
            sessions = start(stack, arms, threads)
            measure_all(sessions, dtype, record, rounds, memory)
    except (EngineError, CachedPromptError) as error:
        _report.console.print(str(error), markup=False, highlight=False)
        raise typer.Exit(1) from None
    _report.write_json(json, record)


if __name__ == "__main__":
    typer.run(main)

# SPDX-License-Identifier: Apache-2.0
"""`polykv check`: can a model be served compressed, and what does that save?"""

from importlib.util import find_spec
from pathlib import Path

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from polykv_vllm.capacity import DEFAULT_BLOCK_SIZE, capacity_tokens, load_config
from polykv_vllm.formats import FORMATS, get_format
from polykv_vllm.models import MODELS, built_model
from polykv_vllm.quality import Verdict, nearest
from polykv_vllm.support import Support, check_model
from polykv_vllm.windows.sizes import MEMORY_SHARE, PAGE_TOKENS, WindowSizes


class CheckError(Exception):
    """The model cannot be served, or nothing can be said; the message says why."""


def run_check(model: str, kv_cache_dtype: str) -> Support:
    """Read the config of `model` and return what is known about serving it.

    Args:
        model: A directory, a hub name, or a name of the catalogue.
        kv_cache_dtype: A value of `--kv-cache-dtype` that is ours.

    Raises:
        CheckError: The model is not supported, or its config cannot be read.

    """
    if find_spec("transformers") is None:
        raise CheckError("reading a model's config needs transformers: install vLLM")
    try:
        get_format(kv_cache_dtype)
        support = check_model(load_config(_location(model)), kv_cache_dtype)
    except (OSError, ValueError) as error:
        raise CheckError(f"{model}: {error}") from error
    if not support.ok:
        reasons = "".join(f"\n  - {reason}" for reason in support.reasons)
        raise CheckError(
            f"{model} cannot be served with --kv-cache-dtype {kv_cache_dtype}:{reasons}"
        )
    return support


def _location(model: str) -> str:
    """Return where the config lies; does not build a catalogue model."""
    if model not in MODELS or Path(model).exists():
        return model
    if (path := built_model(model)) is None:
        raise CheckError(f"{model} is not built yet: polykv model {model}")
    return str(path)


CONTEXT_TOKENS = 8192
"""Length of the sequences for which windows are counted."""


def print_check(
    console: Console,
    model: str,
    support: Support,
    memory_gib: float,
    windows: WindowSizes | None = None,
) -> None:
    """Print the model's cache in the format beside vLLM's bf16 cache.

    Args:
        console: Where to.
        model: As it was named.
        support: That of the model.
        memory_gib: Size of the caches.
        windows: Tokens that are seen in full precision; None for none.

    """
    fmt = support.fmt
    if fmt is None:
        raise ValueError("print_check is for supported models")
    console.print(
        f"[green]✓[/] {escape(model)} can be served: {support.architecture}, "
        f"{support.describe_layers()}, format {fmt.name}",
        highlight=False,
        soft_wrap=True,
    )
    token_bytes = (support.uncompressed_bytes_per_token(), support.bytes_per_token)
    capacities = [capacity_tokens(int(memory_gib * 2**30), b) for b in token_bytes]
    table = Table(box=box.ROUNDED)
    table.add_column("")
    table.add_column("vLLM bf16", justify="right")
    table.add_column(fmt.name, justify="right", style="bold")
    table.add_column("ratio", justify="right", style="green")
    tokens_label = f"tokens in {memory_gib:g} GiB, blocks of {DEFAULT_BLOCK_SIZE}"
    rows = [("bytes per token, all layers", token_bytes), (tokens_label, capacities)]
    if windows is not None:
        own = windows.bytes_per_sequence(token_bytes[0]) / CONTEXT_TOKENS
        label = f"the same with windows, sequences of {CONTEXT_TOKENS:,}"
        rows.append((label, (token_bytes[0], round(token_bytes[1] + own))))
    for label, (stock, ours) in rows:
        ratio = (
            f"{max(stock, ours) / min(stock, ours):.2f}x" if min(stock, ours) else ""
        )
        table.add_row(label, f"{stock:,}", f"{ours:,}", ratio)
    console.print(table)
    if windows is not None:
        _print_windows(console, windows, token_bytes[0], memory_gib)
    _print_quality(console, support, fmt.name)
    if support.num_sliding_layers:
        console.print(
            f"[dim]{support.num_sliding_layers} layers keep only the newest "
            f"{support.sliding_window:,} tokens: both caches hold more than this.[/]",
            highlight=False,
        )
    if support.num_linear_layers:
        console.print(
            f"[dim]{support.num_linear_layers} linear-attention layers keep states, "
            "uncompressed and not counted here: both caches hold fewer than this.[/]",
            highlight=False,
            soft_wrap=True,
        )


def _print_windows(
    console: Console, windows: WindowSizes, token_bytes: int, memory_gib: float
) -> None:
    """Say what windows of full precision take."""
    size = windows.bytes_per_sequence(token_bytes)
    count = int(memory_gib * 2**30 * MEMORY_SHARE) // size if size else 0
    console.print(
        f"windows {windows.sink_tokens}/{windows.recent_tokens}: "
        f"{windows.pages_per_sequence} pages of {PAGE_TOKENS} tokens, "
        f"{size / 2**20:.2f} MiB for each running sequence in bf16; at most {count} "
        f"run at once in {memory_gib:g} GiB, unless windows.max_sequences says more",
        highlight=False,
        soft_wrap=True,
    )


def _print_quality(console: Console, support: Support, kv_cache_dtype: str) -> None:
    """Say what was measured on models of this kind, and warn where that was bad."""
    found = nearest(support.architecture, support.head_size, kv_cache_dtype)
    if not found:
        console.print(
            f"[yellow]quality: not measured for {support.architecture}[/]; see docs/"
            "quality.md, or measure it: polykv eval",
            highlight=False,
            soft_wrap=True,
        )
        return
    for each in found:
        colour = "green" if each.verdict is Verdict.RECOMMENDED else "yellow"
        size = "" if each.head_size == support.head_size else f" of {each.head_size}"
        console.print(
            f"[{colour}]quality: {each.verdict}[/], as measured on {each.model}"
            f"{f' (heads{size})' if size else ''}: {each.describe()}",
            highlight=False,
            soft_wrap=True,
        )
    if any(each.verdict is not Verdict.RECOMMENDED for each in found):
        better = [
            name
            for name in FORMATS
            if (others := nearest(support.architecture, support.head_size, name))
            and all(other.verdict is Verdict.RECOMMENDED for other in others)
        ]
        if better:
            console.print(f"recommended here: {', '.join(better)}", soft_wrap=True)

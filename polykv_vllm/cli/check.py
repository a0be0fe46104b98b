# SPDX-License-Identifier: Apache-2.0
"""`polykv check`: can a model be served compressed, and what does that save?"""

from importlib.util import find_spec
from pathlib import Path

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from polykv_vllm.capacity import DEFAULT_BLOCK_SIZE, capacity_tokens, load_config
from polykv_vllm.formats import get_format
from polykv_vllm.models import MODELS, built_model
from polykv_vllm.support import Support, check_model


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


def key_treatment(model: str, support: Support) -> str:
    """Say which treatment the keys of a supported model will get.

    It is known where the weights lie in a directory; nothing is loaded.
    """
    from polykv_vllm.keys import choose_treatment
    from polykv_vllm.keys.checkpoint import UnreadableCheckpointError, read_checkpoint

    location = Path(_location(model))
    if not location.is_dir() or support.fmt is None:
        return "chosen when the weights are loaded"
    config = load_config(str(location)).get_text_config()
    try:
        projections = read_checkpoint(location, config)
    except UnreadableCheckpointError as error:
        return f"chosen when the weights are loaded ({error})"
    treatment = choose_treatment(projections, support.fmt)
    return f"{treatment}, chosen from the weights"


def _location(model: str) -> str:
    """Return where the config lies; does not build a catalogue model."""
    if model not in MODELS or Path(model).exists():
        return model
    if (path := built_model(model)) is None:
        raise CheckError(f"{model} is not built yet: polykv model {model}")
    return str(path)


def print_check(
    console: Console,
    model: str,
    support: Support,
    memory_gib: float,
    treatment: str = "",
) -> None:
    """Print the model's cache in the format beside vLLM's bf16 cache."""
    fmt = support.fmt
    if fmt is None:
        raise ValueError("print_check is for supported models")
    console.print(
        f"[green]✓[/] {escape(model)} can be served: {support.architecture}, "
        f"{support.num_layers} layers, {support.num_kv_heads} KV heads x "
        f"{support.head_size}, format {fmt.name}",
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
    rows = (("bytes per token, all layers", token_bytes), (tokens_label, capacities))
    for label, (stock, ours) in rows:
        ratio = (
            f"{max(stock, ours) / min(stock, ours):.2f}x" if min(stock, ours) else ""
        )
        table.add_row(label, f"{stock:,}", f"{ours:,}", ratio)
    console.print(table)
    if treatment:
        console.print(
            f"Key treatment: {escape(treatment)}", highlight=False, soft_wrap=True
        )
    if support.num_sliding_layers:
        console.print(
            f"[dim]{support.num_sliding_layers} layers keep only the newest "
            f"{support.sliding_window:,} tokens: both caches hold more than this.[/]",
            highlight=False,
        )

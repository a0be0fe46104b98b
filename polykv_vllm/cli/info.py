# SPDX-License-Identifier: Apache-2.0
"""`polykv info`: what is installed, what it can do, and how it is attached."""

from importlib.util import find_spec

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from polykv_vllm import __version__
from polykv_vllm.config import key_treatments
from polykv_vllm.formats import ALIASES, FORMATS, SUPPORTED_HEAD_DIMS

_NOT_INSTALLED = "[yellow]not installed[/]"


SHOWN_HEAD_DIMS = (64, 128, 256)
"""Head sizes with a column of their own; the others are multiples of 16 too."""


def print_info(console: Console) -> None:
    """Print versions, formats and seams; works without vLLM and without torch."""
    facts = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    facts.add_column(style="cyan")
    facts.add_column()
    for name, value in _facts().items():
        facts.add_row(name, value)
    console.print(facts)
    console.print()
    console.print(_formats_table())
    if _has("vllm"):
        console.print(_seams_table())


def _has(module: str) -> bool:
    return find_spec(module) is not None


def _facts() -> dict[str, str]:
    facts = {"polykv-vllm": __version__, "vLLM": _vllm()}
    facts["kernels"] = _kernels() if _has("torch") else f"torch is {_NOT_INSTALLED}"
    facts["key_treatment"] = ", ".join(key_treatments()) + " (the default: auto)"
    return facts


def _vllm() -> str:
    if not _has("vllm"):
        return f"{_NOT_INSTALLED} (0.32 is needed to serve)"
    from vllm.platforms import current_platform

    from polykv_vllm.seams import registry

    platform = current_platform.device_type or "none detected"
    supported = registry.VLLM_VERSIONS
    return f"{registry.vllm_version()}, platform {platform} (supported: {supported})"


def _kernels() -> str:
    from polykv_vllm import ops

    try:
        current, available = ops.current_isa(), ops.available_isas()
        absent = [isa for isa in ops.compiled_isas() if isa not in available]
    except (ImportError, OSError, ValueError) as error:
        return f"[red]not usable[/]: {escape(str(error))}"
    without = f"; not on this CPU: {', '.join(absent)}" if absent else ""
    return f"CPU, {current} in use (available: {', '.join(available)}{without})"


def _formats_table() -> Table:
    table = Table(
        title="Formats: bytes per token and KV head, ratio to bf16",
        title_justify="left",
        caption=f"Head sizes: {', '.join(map(str, SUPPORTED_HEAD_DIMS))}",
        caption_justify="left",
        box=box.ROUNDED,
    )
    table.add_column("--kv-cache-dtype", style="bold", no_wrap=True)
    table.add_column("keys")
    table.add_column("values")
    for head_dim in SHOWN_HEAD_DIMS:
        table.add_column(f"head {head_dim}", justify="right", no_wrap=True)
    for name, spec in FORMATS.items():
        aliases = [alias for alias, target in ALIASES.items() if target == name]
        sizes = [
            f"{spec.slot_bytes(d)} [green]{spec.compression_ratio(d):.2f}x[/]"
            for d in SHOWN_HEAD_DIMS
        ]
        table.add_row(
            "\n".join([name, *(f"[dim]= {alias}[/]" for alias in aliases)]),
            f"{spec.key_bits} bit",
            f"{spec.value_bits} bit",
            *sizes,
        )
    return table


def _seams_table() -> Table:
    from polykv_vllm.seams import registry
    from polykv_vllm.seams.seam import SeamState

    registry.install()  # as every vLLM process with this plugin does
    table = Table(title="Seams into vLLM", title_justify="left", box=box.ROUNDED)
    table.add_column("seam", style="bold")
    table.add_column("state")
    table.add_column("why")
    for row in registry.report():
        color = "red" if row.state is SeamState.CHANGED else "green"
        state = f"[{color}]{row.state}[/]"
        if row.reason:
            state += f"\n{escape(row.reason)}"
        table.add_row(row.seam.name, state, escape(row.seam.why))
    return table

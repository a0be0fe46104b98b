# SPDX-License-Identifier: Apache-2.0
"""The servers that are compared."""

import json
from dataclasses import dataclass, replace
from pathlib import Path

from polykv_vllm.formats import CACHE_DTYPES
from polykv_vllm.windows.sizes import RECOMMENDED_WINDOWS, WindowError, WindowSizes

UNSHARED = "-unshared"
BOUND = "bound"
DISK = "polykv-disk"
FOLDER = "{folder}"
"""In the arguments of an arm: a folder of the benchmark's own."""

_WORKERS = "polykv_vllm.bench.workers"


@dataclass(frozen=True)
class Arm:
    """One way to serve.

    Attributes:
        name: In tables and files.
        about: For the legend.
        cache_dtype: Value of `--kv-cache-dtype`.
        serve_args: Further arguments of `vllm serve`; see `FOLDER`.
        needs_amx: It differs from another arm only on a CPU with AMX.
        is_bound: It computes no attention: a bound for speed, its answers are noise.

    """

    name: str
    about: str
    cache_dtype: str
    serve_args: tuple[str, ...] = ()
    needs_amx: bool = False
    is_bound: bool = False

    @property
    def is_ours(self) -> bool:
        """Whether polykv's cache is what this arm shows."""
        return self.cache_dtype in CACHE_DTYPES and not self.is_bound


def _worker(name: str) -> tuple[str, ...]:
    return ("--worker-extension-cls", f"{_WORKERS}.{name}")


_STOCK = (
    Arm("stock", "vLLM's own cache in the model's dtype, its own attention", "auto"),
    Arm("stock-fp8", "vLLM's own 8-bit cache", "fp8"),
    Arm(
        "stock-avx512",
        "stock with its attention kept off AMX, as on a CPU without it",
        "auto",
        _worker("without_amx.WithoutAmx"),
        needs_amx=True,
    ),
    Arm(
        BOUND,
        "polykv with an attention that costs nothing: no attention can be faster",
        "polykv",
        _worker("without_attention.WithoutAttention"),
        is_bound=True,
    ),
)


def _ours(cache_dtype: str) -> tuple[Arm, Arm]:
    off = json.dumps({"polykv": {"prefix_sharing": False}})
    return (
        Arm(
            f"{cache_dtype}{UNSHARED}",
            f"{cache_dtype}, every agent reads the shared blocks for itself",
            cache_dtype,
            ("--additional-config", off),
        ),
        Arm(
            cache_dtype,
            f"{cache_dtype}, shared blocks are read once for all agents",
            cache_dtype,
        ),
    )


_ON_DISK = Arm(
    DISK,
    "polykv, every full block is written to disk in the background",
    "polykv",
    (
        "--additional-config",
        json.dumps({"polykv": {"pool": {"path": f"{FOLDER}/pool"}}}),
    ),
)

ARMS: dict[str, Arm] = {
    arm.name: arm
    for arm in (
        *_STOCK,
        *(arm for dtype in CACHE_DTYPES for arm in _ours(dtype)),
        _ON_DISK,
    )
}


def arm_named(name: str) -> Arm:
    """Return an arm, such as `polykv_k2v2+windows64-256`.

    Raises:
        ValueError: There is none of that name; the message lists all.

    """
    base, with_windows, suffix = name.partition("+")
    if base not in ARMS:
        raise ValueError(f"there is no arm {name!r}; there are: {', '.join(ARMS)}")
    if not with_windows:
        return ARMS[base]
    if base not in CACHE_DTYPES:
        formats = ", ".join(CACHE_DTYPES)
        raise ValueError(f"arm {name!r}: windows are possible with {formats}")
    try:
        sizes = WindowSizes.of_arm(suffix, WindowSizes(*RECOMMENDED_WINDOWS))
    except WindowError as error:
        raise ValueError(f"arm {name!r}: {error}") from None
    return _with_windows(name, ARMS[base], sizes)


def _with_windows(name: str, arm: Arm, sizes: WindowSizes) -> Arm:
    first, last = sizes.sink_tokens, sizes.recent_tokens
    return replace(
        arm,
        name=name,
        about=f"{arm.about}; first {first} and last {last} tokens in full precision",
        serve_args=(
            "--additional-config",
            json.dumps({"polykv": {"windows": sizes.option}}),
        ),
    )


def cpu_has_amx(cpuinfo: str = "/proc/cpuinfo") -> bool:
    """Whether this CPU computes bf16 with AMX."""
    try:
        return "amx_bf16" in Path(cpuinfo).read_text()
    except OSError:
        return False

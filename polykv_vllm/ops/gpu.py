# SPDX-License-Identifier: Apache-2.0
"""The Triton kernels behind the ops' signatures (isa "triton").

Triton is imported when a layer asks for a kernel, not before: CPU users need none.
With `TRITON_INTERPRET=1` the same kernels also run on CPU tensors, slowly.
"""

import os
from collections.abc import Callable
from typing import Any

from polykv_vllm.formats import FORMATS, FormatSpec

ISA = "triton"
MIN_TRITON = (3, 4)

INTERPRET_VARIABLE = "TRITON_INTERPRET"


def devices() -> tuple[str, ...]:
    """Return the device types that the kernels can run on in this process."""
    interpreted = os.environ.get(INTERPRET_VARIABLE, "0") not in ("", "0")
    return ("cuda", "cpu") if interpreted else ("cuda",)


def require_triton() -> None:
    """Check that there is a Triton that the kernels can be built with.

    Raises:
        NotImplementedError: There is none, or it is too old.

    """
    needed = ".".join(map(str, MIN_TRITON))
    try:
        import triton
    except ImportError as error:
        raise NotImplementedError(
            f"polykv's GPU kernels need Triton {needed} or later, which is not "
            "installed; CUDA builds of torch bring it"
        ) from error
    version = str(triton.__version__)
    if tuple(int(part) for part in version.split(".")[:2]) < MIN_TRITON:
        raise NotImplementedError(
            f"polykv's GPU kernels need Triton {needed} or later; this is {version}"
        )


def cuda_capability_reasons(capability: int) -> list[str]:
    """Return why an architecture (10 * major + minor) is not served, if it is not."""
    from polykv_vllm.kernels.triton.config import capability_reason

    reason = capability_reason(capability)
    return [] if reason is None else [reason]


def gpu_shape_reasons(fmt: FormatSpec, head_dim: int, group: int) -> list[str]:
    """Return what of a format and a layer's shape the GPU kernels do not have.

    Args:
        fmt: The format.
        head_dim: Elements per head.
        group: Query heads per KV head.

    """
    from polykv_vllm.kernels.triton.config import LARGE_ROWS
    from polykv_vllm.kernels.triton.tile import HEAD_DIMS

    reasons = []
    if fmt.is_low_bit:
        served = ", ".join(f.name for f in FORMATS.values() if not f.is_low_bit)
        reasons.append(f"{fmt.name} has no GPU kernels; possible: {served}")
    if head_dim not in HEAD_DIMS:
        sizes = ", ".join(map(str, HEAD_DIMS))
        reasons.append(f"head size {head_dim} has no GPU kernels; possible: {sizes}")
    if group > LARGE_ROWS:
        reasons.append(
            f"{group} query heads per KV head; the GPU kernels take up to {LARGE_ROWS}"
        )
    return reasons


def implementations() -> dict[str, tuple[Callable[..., Any], Callable[..., Any]]]:
    """Return {isa: (makes a layer's store, makes its attention)}."""
    return {ISA: (_store, _attention)}


def _store(*args: Any) -> Any:
    require_triton()
    from polykv_vllm.kernels.triton.launch import LayerStore

    return LayerStore(*args)


def _attention(*args: Any) -> Any:
    require_triton()
    from polykv_vllm.kernels.triton.launch import LayerAttention

    return LayerAttention(*args)

# SPDX-License-Identifier: Apache-2.0
"""Another of vLLM's kernel libraries than the one that it loads on this CPU.

vLLM has one for CPUs with AVX-512 and BF16, one for AVX-512 without BF16 and one for
AVX2; a process can hold one of them. `take` chooses it and so has to come before
anything of vLLM's that loads kernels: in a process of its own, at its start.
"""

import sys
from importlib import import_module

import torch

LIBRARIES = {"avx512": "vllm._C_AVX512", "avx2": "vllm._C_AVX2"}
"""Name to module."""
ISAS = {"avx512": "avx512bw", "avx2": "avx2"}
"""Our kernels for the CPUs on which vLLM loads that library."""
_LOADED_NONETHELESS = "dynamic module does not define module export function"

_taken: str | None = None


def take(name: str) -> None:
    """Make this process's vLLM load the library `name`.

    Raises:
        RuntimeError: Its kernels are already loaded.

    """
    from vllm.platforms import current_platform

    global _taken
    if "vllm._custom_ops" in sys.modules:
        raise RuntimeError("vLLM's kernels are already loaded in this process")
    _taken = name
    type(current_platform).import_kernels = classmethod(  # type: ignore[assignment]
        lambda _: _import(LIBRARIES[name])
    )


def _import(module: str) -> None:
    # The file registers its operators as it is loaded, but has no Python module in it.
    try:
        import_module(module)
    except ImportError as error:
        if _LOADED_NONETHELESS not in str(error):
            raise


def paths() -> dict[str, str]:
    """Return {path: name} of vLLM's attention paths in this process, the general first.

    Only the library that vLLM itself takes on a CPU with AMX has a path for it.
    """
    if _taken == "avx2":
        return {"vec": "AVX2"}
    if _taken == "avx512":
        return {"vec": "AVX-512 without BF16"}
    general = "AVX-512" if torch.cpu._is_avx512_supported() else "AVX2"
    if torch.cpu._is_amx_tile_supported():
        return {"vec": general, "amx": "AMX"}
    return {"vec": general}


def choice(head_dim: int, block_size: int) -> str:
    """Return the path that vLLM itself takes here for a bf16 model."""
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    path = _get_attn_isa(torch.bfloat16, block_size, head_dim, "auto")
    return path if _taken is None or path != "amx" else "vec"

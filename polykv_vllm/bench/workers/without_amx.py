# SPDX-License-Identifier: Apache-2.0
"""vLLM's own attention on the path that a CPU without AMX takes.

vLLM has no switch for it: it takes AMX where the CPU has it. Linear layers (oneDNN)
keep their AMX in this arm as in all others.
"""

from typing import Any

from vllm.v1.attention.backends import cpu_attn

_choose = cpu_attn._get_attn_isa


def _without_amx(*args: Any, **kwargs: Any) -> str:
    isa: str = _choose(*args, **kwargs)
    return "vec" if isa == "amx" else isa


cpu_attn._get_attn_isa = _without_amx


class WithoutAmx:
    """Mixed into vLLM's worker; importing this module is what it is for."""

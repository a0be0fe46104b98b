# SPDX-License-Identifier: Apache-2.0
"""The worker of the arm "stock without AMX".

vLLM has no switch for its attention path: it takes AMX where the CPU has it. This
module, which only that arm's worker imports, makes the choice as on a CPU without AMX.
The rest (linear layers through oneDNN) keeps its AMX in all arms alike.
"""

from typing import Any

from vllm.v1.attention.backends import cpu_attn

from benchmarks._worker import BenchmarkWorker

_choose = cpu_attn._get_attn_isa


def _without_amx(*args: Any, **kwargs: Any) -> str:
    isa = _choose(*args, **kwargs)
    return "vec" if isa == "amx" else isa


cpu_attn._get_attn_isa = _without_amx


class Avx512Worker(BenchmarkWorker):
    """`BenchmarkWorker` in a process whose attention takes the general path."""

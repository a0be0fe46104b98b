# SPDX-License-Identifier: Apache-2.0
"""Tells windows of full precision which requests a step has, and which have ended.

A metadata builder sees the batch without names, and not those that run and wait.
"""

from collections.abc import Callable
from typing import Any

from polykv_vllm.seams.seam import Seam, Wrap
from polykv_vllm.windows.sizes import PLAN_ATTRIBUTE

_TARGET = "vllm.v1.worker.gpu_model_runner:GPUModelRunner._update_states"


def _announce(original: Callable[..., Any]) -> Callable[..., Any]:
    def _update_states(self: Any, scheduler_output: Any) -> Any:
        result = original(self, scheduler_output)
        if getattr(self, PLAN_ATTRIBUTE, None):
            from polykv_vllm.attention.window_memory import announce_step

            announce_step(self, scheduler_output)
        return result

    return _update_states


SEAM = Seam(
    name="window_steps",
    target=_TARGET,
    why="a metadata builder does not learn which requests it builds for",
    upstream="none",
    expected=("(self, scheduler_output)",),
    remove_when="vLLM names the requests in CommonAttentionMetadata, and those ended",
    is_obsolete=lambda: False,
    change=Wrap("window_steps", _TARGET, _announce, compare="signature"),
)

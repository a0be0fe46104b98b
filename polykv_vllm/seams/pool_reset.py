# SPDX-License-Identifier: Apache-2.0
"""Gives up pins before the prefix cache is reset, which pinned blocks would prevent."""

from collections.abc import Callable
from typing import Any

from polykv_vllm.pool.pins import ATTRIBUTE
from polykv_vllm.seams.seam import Seam, Wrap

_TARGET = "vllm.v1.core.sched.scheduler:Scheduler.reset_prefix_cache"


def _unpin_first(original: Callable[..., bool]) -> Callable[..., bool]:
    def reset_prefix_cache(
        self: Any, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        if (pool := getattr(self, ATTRIBUTE, None)) is not None:
            pool.on_reset()
        return original(self, reset_running_requests, reset_connector)

    return reset_prefix_cache


SEAM = Seam(
    name="pool_reset",
    target=_TARGET,
    why="with pinned blocks vLLM refuses to reset its prefix cache",
    upstream="none",
    expected=("(self, reset_running_requests=False, reset_connector=False)",),
    remove_when="vLLM has pins of its own",
    is_obsolete=lambda: False,
    change=Wrap("pool_reset", _TARGET, _unpin_first, compare="signature"),
)

# SPDX-License-Identifier: Apache-2.0
"""Tells the pool of an engine that has one which requests come."""

from collections.abc import Callable
from typing import Any

from polykv_vllm.pool.pins import ATTRIBUTE
from polykv_vllm.seams.seam import Seam, Wrap

_TARGET = "vllm.v1.core.sched.scheduler:Scheduler.add_request"


def _note_request(original: Callable[..., None]) -> Callable[..., None]:
    def add_request(self: Any, request: Any) -> None:
        original(self, request)
        if (pool := getattr(self, ATTRIBUTE, None)) is not None:
            pool.on_request(request)

    return add_request


SEAM = Seam(
    name="pool_requests",
    target=_TARGET,
    why="named prefixes cannot count their hits and refresh their time to live",
    upstream="none",
    expected=("(self, request)",),
    remove_when="vLLM tells plugins of the scheduler about its requests",
    is_obsolete=lambda: False,
    change=Wrap("pool_requests", _TARGET, _note_request, compare="signature"),
)

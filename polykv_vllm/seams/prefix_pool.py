# SPDX-License-Identifier: Apache-2.0
"""Lets routes ask the engine core about prefixes.

vLLM's endpoint plugins reach workers, not the scheduler, in whose process the cache is
kept. A method is added to the engine core, which the front end calls by name.
"""

from typing import Any

from polykv_vllm.seams.seam import AddMethod, Seam

METHOD = "polykv_pool"
"""The name by which the front end calls the added method."""

_TARGET = "vllm.v1.engine.core:EngineCore"


def _polykv_pool(core: Any, operation: str, argument: dict[str, Any]) -> dict[str, Any]:
    from polykv_vllm.pool.core import call

    return call(core, operation, argument)


SEAM = Seam(
    name="prefix_pool",
    target=_TARGET,
    why="a route cannot reach the scheduler's process, where the cache is kept",
    upstream="none",
    expected=("free",),
    remove_when="vLLM has pins, or lets plugins add methods to the engine core",
    is_obsolete=lambda: False,
    change=AddMethod("prefix_pool", _TARGET, METHOD, _polykv_pool),
)

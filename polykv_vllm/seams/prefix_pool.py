# SPDX-License-Identifier: Apache-2.0
"""Lets routes ask the engine core about prefixes, and the pool see what happens.

vLLM's endpoint plugins reach workers, not the scheduler, in whose process the cache is
kept. A method is added to the engine core, which the front end calls by name; and two
methods of the scheduler tell the pool of an engine that has one.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from polykv_vllm.seams import probe
from polykv_vllm.seams.seam import Seam, Wrap

METHOD = "polykv_pool"
"""The name by which the front end calls the added method."""

_CORE = "vllm.v1.engine.core:EngineCore"
_SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler"
_RESET_SIGNATURE = "(self, reset_running_requests=False, reset_connector=False)"
_ATTRIBUTE = "_polykv_pool"


def _polykv_pool(core: Any, operation: str, argument: dict[str, Any]) -> dict[str, Any]:
    from polykv_vllm.pool.core import call

    return call(core, operation, argument)


def _note_request(original: Callable[..., None]) -> Callable[..., None]:
    def add_request(self: Any, request: Any) -> None:
        original(self, request)
        if (pool := getattr(self, _ATTRIBUTE, None)) is not None:
            pool.on_request(request)

    return add_request


def _unpin_first(original: Callable[..., bool]) -> Callable[..., bool]:
    def reset_prefix_cache(
        self: Any, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        if (pool := getattr(self, _ATTRIBUTE, None)) is not None:
            pool.on_reset()
        return original(self, reset_running_requests, reset_connector)

    return reset_prefix_cache


@dataclass(frozen=True)
class PoolMethods:
    """Adds one method to the engine core and wraps two of the scheduler."""

    wraps: tuple[Wrap, ...] = (
        Wrap(
            "prefix_pool",
            f"{_SCHEDULER}.add_request",
            _note_request,
            compare="signature",
        ),
        Wrap(
            "prefix_pool",
            f"{_SCHEDULER}.reset_prefix_cache",
            _unpin_first,
            compare="signature",
        ),
    )

    def fingerprint(self) -> str:
        """Describe the wrapped methods, and a core without ours."""
        core = probe.resolve(_CORE)[2]
        own = "taken" if hasattr(core, METHOD) else "free"
        return " ".join([own, *(wrap.fingerprint() for wrap in self.wraps)])

    def is_installed(self) -> bool:
        """Whether all three are in place."""
        core = probe.resolve(_CORE)[2]
        is_ours = getattr(core, METHOD, None) is _polykv_pool
        return is_ours and all(wrap.is_installed() for wrap in self.wraps)

    def install(self) -> None:
        """Put them in place."""
        setattr(probe.resolve(_CORE)[2], METHOD, _polykv_pool)
        for wrap in self.wraps:
            wrap.install()

    def uninstall(self) -> None:
        """Take them away."""
        core = probe.resolve(_CORE)[2]
        if getattr(core, METHOD, None) is _polykv_pool:
            delattr(core, METHOD)
        for wrap in self.wraps:
            wrap.uninstall()


SEAM = Seam(
    name="prefix_pool",
    target=_CORE,
    why="a route cannot reach the scheduler's process, where the cache is kept",
    upstream="none",
    expected=(f"free (self, request) {_RESET_SIGNATURE}",),
    remove_when="vLLM has pins, or lets plugins add methods to the engine core",
    is_obsolete=lambda: False,
    change=PoolMethods(),
)

# SPDX-License-Identifier: Apache-2.0
"""Watches the methods of vLLM's scheduler that `pool/scheduler.py` extends.

vLLM takes the scheduler's class from its configuration, so nothing is replaced here.
But the class that we name there is a subclass, and the methods that it extends are
not a public interface: their fingerprints say whether they are still the same.
"""

import inspect
from dataclasses import dataclass

from polykv_vllm.pool import selection
from polykv_vllm.seams import probe, source
from polykv_vllm.seams.seam import Seam

_TARGET = "vllm.v1.core.sched.scheduler:Scheduler"
_EXTENDED = (
    "_handle_blocked_waiting_request",
    "_make_cached_request_data",
    "_reserve_prefill_lookahead",
)
_DUPLICATES = "vllm.v1.core.block_pool:BlockHashToBlockMap"


@dataclass(frozen=True)
class Subclass:
    """Makes a scheduler eligible whose base class is the expected one."""

    target: str = _TARGET
    extended: tuple[str, ...] = _EXTENDED
    scheduler: str = selection.SCHEDULER

    def fingerprint(self) -> str:
        """Describe the methods that the subclass extends."""
        targets = (f"{self.target}.{name}" for name in self.extended)
        return " ".join(probe.fingerprint(probe.resolve(t)[2]) for t in targets)

    def is_installed(self) -> bool:
        """Whether `select_scheduler` may choose the subclass."""
        return self.scheduler in selection.eligible

    def is_present(self) -> bool:
        """Nothing of vLLM is replaced, so there is nothing to patch."""
        return False

    def edits(self, tree: source.SourceTree) -> dict[str, str]:
        """See `is_present`."""
        return {}

    def fingerprint_in(self, tree: source.SourceTree) -> str:
        """Describe the methods that the subclass extends, from the source."""
        found = (tree.find(f"{self.target}.{name}") for name in self.extended)
        return " ".join(source.fingerprint(*parts) for parts in found)

    def install(self) -> None:
        """Let `select_scheduler` choose the subclass."""
        selection.eligible.add(self.scheduler)

    def uninstall(self) -> None:
        """Leave vLLM's own scheduler in place."""
        selection.eligible.discard(self.scheduler)


def _is_obsolete() -> bool:
    documentation = inspect.getdoc(probe.resolve(_DUPLICATES)[2]) or ""
    return "don't de-duplicate" not in documentation


SEAM = Seam(
    name="scheduler",
    target=_TARGET,
    why="requests that compute the same block at once each keep a copy of it",
    upstream="vllm#9668 (kept by design), vllm#44882 (RFC for external prefixes)",
    expected=("7eca38e206b596a8 018c8e581e2c0bb3 91745fa648973f12",),
    remove_when="vLLM de-duplicates the blocks in its prefix cache",
    is_obsolete=_is_obsolete,
    change=Subclass(),
)

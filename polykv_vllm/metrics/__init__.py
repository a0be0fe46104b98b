# SPDX-License-Identifier: Apache-2.0
"""Counters that workers write and the front end shows on vLLM's `/metrics`.

They cross from process to process in one small shared file per worker: `recorder`
writes it, `collector` reads it, `worker_file` is the only module that knows its bytes.
`docs/metrics.md` says what each metric means.
"""

from polykv_vllm.metrics.recorder import (
    BatchSharing,
    Recorder,
    WindowCounts,
    get_recorder,
    open_recorder,
)
from polykv_vllm.metrics.worker_file import UNSHARED_REASONS

__all__ = [
    "UNSHARED_REASONS",
    "BatchSharing",
    "Recorder",
    "WindowCounts",
    "get_recorder",
    "open_recorder",
]

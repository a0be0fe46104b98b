# SPDX-License-Identifier: Apache-2.0
"""Watches an engine's load while requests run."""

import threading
from types import TracebackType
from typing import Self

from polykv_vllm.scrape import EngineLoad, engine_load
from polykv_vllm.server import ServerError, VllmServer

_INTERVAL_S = 0.1


class LoadSampler:
    """Context manager: reads `/metrics` in a thread until it is left.

    vLLM publishes the figures of one step together, so a sample is consistent.
    """

    def __init__(self, server: VllmServer) -> None:
        self.samples: list[EngineLoad] = []
        self._server = server
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._is_over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._is_over.wait(_INTERVAL_S):
            try:
                self.samples.append(engine_load(self._server.metrics()))
            except ServerError:  # the client's run fails, too, and says so
                return


def peak_usage_by_running(samples: list[EngineLoad]) -> dict[int, float]:
    """Return the largest share of blocks in use for each number of running requests."""
    peaks: dict[int, float] = {}
    for load in samples:
        if load.running:
            peaks[load.running] = max(peaks.get(load.running, 0.0), load.cache_usage)
    return dict(sorted(peaks.items()))

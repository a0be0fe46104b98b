# SPDX-License-Identifier: Apache-2.0
"""A worker's side of the metrics: plain additions into memory.

It needs neither torch nor vLLM. A recorder that was not opened counts as well, in
memory that nobody else sees, so callers need no case for it.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from polykv_vllm import envs
from polykv_vllm.metrics import worker_file as wf

logger = logging.getLogger("vllm.polykv")


@dataclass(slots=True)
class BatchSharing:
    """How one batch of one KV cache group is attended.

    A token is attended once for each pair of a query token and a cached token that it
    sees (window and causality applied), whatever the number of heads and layers.

    Attributes:
        shared_tokens: Attended tokens that were read once for several requests.
        unshared_tokens: The others, by one of `UNSHARED_REASONS`.
        prefixes: Distinct cached prefixes with at least two readers.
        readers_max: Requests that read the most popular of them.
        readers_mean: Requests that read a token of them, on average.
        physical_bytes: Compressed bytes of the distinct blocks in these prefixes, all
            layers of the group, as this worker holds them.
        logical_bytes: Bytes that the same tokens would take in 16 bits with a private
            copy for each of their readers.
        build_seconds: Time spent finding all this.

    """

    shared_tokens: int = 0
    unshared_tokens: Mapping[str, int] = field(default_factory=dict)
    prefixes: int = 0
    readers_max: int = 0
    readers_mean: float = 0.0
    physical_bytes: int = 0
    logical_bytes: int = 0
    build_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class WindowCounts:
    """The raw pages of one KV cache group after a step.

    Attributes:
        pages: How many there are.
        held: Those of running requests.
        kept: Those that only requests would use which continue from their blocks.
        missing_pairs: Pairs of a query token and a cached token that were to be
            attended to in full precision and were as compressed, in this step.

    """

    pages: int
    held: int
    kept: int
    missing_pairs: int


class Recorder:
    """Adds to one worker's figures; used by one thread.

    The seconds are summed in attributes and published once per step, by the last
    layer: with thirty layers that halves the cost of writing them one by one.

    Args:
        figures: float64, laid out as `worker_file` says.

    """

    __slots__ = (
        "_attention_seconds",
        "_figures",
        "_num_groups",
        "_num_layers",
        "_store_seconds",
        "_windows",
    )

    def __init__(self, figures: wf.Figures) -> None:
        self._figures = figures
        self._num_layers = 0
        self._num_groups = 0
        self._windows: list[WindowCounts] = []
        self._attention_seconds: float = figures[wf.ATTENTION_SECONDS]
        self._store_seconds: float = figures[wf.STORE_SECONDS]

    def add_layer(self) -> int:
        """Return the number of one more attention layer, in the order they run."""
        self._num_layers += 1
        return self._num_layers - 1

    def add_store_seconds(self, seconds: float) -> None:
        """Add the time of one layer's store, which its attention follows."""
        self._store_seconds += seconds

    def add_attention_seconds(self, seconds: float, layer: int) -> None:
        """Add the time of one layer's attention; layer 0 counts the step.

        Args:
            seconds: The time.
            layer: From `add_layer`. A draft model's layers have higher numbers than
                the model's, so that its forwards are no steps.

        """
        self._attention_seconds += seconds
        if layer == 0:
            self._figures[wf.STEPS] += 1.0
        if layer == self._num_layers - 1:
            self._figures[wf.ATTENTION_SECONDS] = self._attention_seconds
            self._figures[wf.STORE_SECONDS] = self._store_seconds

    def add_group(self) -> int:
        """Return the number under which a KV cache group records its batches.

        Raises:
            ValueError: There are more groups than the file has room for.

        """
        if self._num_groups == wf.MAX_GROUPS:
            raise ValueError(f"metrics have room for {wf.MAX_GROUPS} KV cache groups")
        self._num_groups += 1
        return self._num_groups - 1

    def add_window_group(self) -> int:
        """Return the number under which a KV cache group records its raw pages."""
        self._windows.append(WindowCounts(0, 0, 0, 0))
        return len(self._windows) - 1

    def record_windows(self, counts: WindowCounts, group: int) -> None:
        """Add what was missing, and make the pages of all groups the latest.

        Args:
            counts: Of one group.
            group: From `add_window_group`.

        """
        self._windows[group] = counts
        figures = self._figures
        figures[wf.WINDOW_MISSING] += counts.missing_pairs
        figures[wf.WINDOW_PAGES] = sum(each.pages for each in self._windows)
        figures[wf.WINDOW_HELD] = sum(each.held for each in self._windows)
        figures[wf.WINDOW_KEPT] = sum(each.kept for each in self._windows)

    def record_batch(self, batch: BatchSharing, group: int = 0) -> None:
        """Add a batch's counts and make its gauges the latest.

        Args:
            batch: The batch.
            group: From `add_group`; a model with one KV cache group may leave it out.

        Raises:
            ValueError: A reason is not in `UNSHARED_REASONS`.

        """
        figures = self._figures
        figures[wf.FOREST_SECONDS] += batch.build_seconds
        figures[wf.SHARED_TOKENS] += batch.shared_tokens
        for reason, tokens in batch.unshared_tokens.items():
            index = wf.UNSHARED_TOKENS.get(reason)
            if index is None:
                known = ", ".join(wf.UNSHARED_REASONS)
                raise ValueError(f"unknown reason {reason!r}; possible: {known}")
            figures[index] += tokens
        start = wf.GROUPS + group * len(wf.GROUP_GAUGES)
        figures[start] = batch.prefixes
        figures[start + 1] = batch.readers_max
        figures[start + 2] = batch.readers_mean
        figures[start + 3] = batch.physical_bytes
        figures[start + 4] = batch.logical_bytes


_recorder = Recorder(wf.private_figures())
_opened: tuple[Path, int, int] | None = None


def get_recorder() -> Recorder:
    """Return this process's recorder, opened or not."""
    return _recorder


def open_recorder(engine: int, rank: int) -> Recorder:
    """Return this process's recorder, seen by the server's front end.

    Calls for the same worker return the same recorder. Without a front end that
    collects, and when its directory cannot be used (a warning says so), the figures
    stay in this process.

    Args:
        engine: Index of the data parallel engine, vLLM's label `engine`.
        rank: Rank of the worker in the engine.

    """
    global _recorder, _opened
    directory = envs.metrics_dir()
    wanted = None if directory is None else (directory, engine, rank)
    if wanted == _opened:
        return _recorder
    figures = wf.private_figures()
    if directory is not None:
        try:
            figures = wf.open_figures(directory, engine, rank)
        except (OSError, ValueError) as error:
            logger.warning("this worker's metrics will be missing: %s", error)
    _recorder, _opened = Recorder(figures), wanted
    return _recorder

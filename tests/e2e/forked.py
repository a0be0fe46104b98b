# SPDX-License-Identifier: Apache-2.0
"""Engines whose processes are forks of one that has imported vLLM.

On CPUs vLLM spawns the two processes of an engine, and each imports vLLM anew: half a
minute of computing together, more than most tests then ask of a small model. Commands
and servers are tested with vLLM's own way.
"""

import functools
import importlib
import multiprocessing
import os
from collections.abc import Callable
from multiprocessing import reduction
from typing import Any
from unittest import mock

PRELOADED = (
    "vllm.v1.engine.core",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.worker.cpu_model_runner",
    "vllm.model_executor.models.llama",
    "polykv_vllm.attention.backend",
)
CORE, EXECUTOR = "vllm.v1.engine.utils", "vllm.v1.executor.multiproc_executor"
"""Modules of vLLM that start processes."""


class ForkContext:
    """A context of `multiprocessing` as vLLM uses it, for the engine core."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("forkserver")
        # Takes effect for the first process alone: one server serves a test run.
        self._context.set_forkserver_preload(list(PRELOADED))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    def Process(self, *, target: Callable[..., Any], **options: Any) -> Any:
        """Return a process with the present environment and output, as if spawned."""
        run = functools.partial(_run_core, _Output(), dict(os.environ), target)
        return self._context.Process(target=run, **options)


class _Output:
    """Where this process writes; the process that unpickles it then does, too."""

    def __reduce__(self) -> Any:
        return _take_output, (reduction.DupFd(1), reduction.DupFd(2))


def _take_output(*handles: Any) -> None:
    for number, handle in enumerate(handles, start=1):
        own = handle.detach()
        os.dup2(own, number)
        os.close(own)


def _run_core(
    _: None, environment: dict[str, str], target: Callable[..., Any], **more: Any
) -> None:
    os.environ.clear()
    os.environ.update(environment)
    # The core has the modules; its worker can be a fork of itself.
    with _context_of(EXECUTOR, multiprocessing.get_context("fork")):
        target(**more)


def _context_of(module: str, context: Any) -> Any:
    found = importlib.import_module(module)
    return mock.patch.object(found, "get_mp_context", lambda: context)


def forked_engine() -> Any:
    """Let vLLM start an engine this way, inside this context."""
    return _context_of(CORE, ForkContext())

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
        """Return a process that has the present environment, as a spawned one has."""
        run = functools.partial(_run_core, dict(os.environ), target)
        return self._context.Process(target=run, **options)


def _run_core(environment: dict[str, str], target: Callable[..., Any], **more: Any):
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

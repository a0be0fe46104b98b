# SPDX-License-Identifier: Apache-2.0
"""Runs all the engines of the features, one after the other.

A program of its own (`python -m tests.e2e.features.program MODELS RESULTS`): an engine
inside the test's process would leave its settings there. Each engine is in a fork of
this process, which has imported vLLM and nothing more: so it starts in a few seconds.
"""

import gc
import importlib
import json
import multiprocessing
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import asdict
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests.e2e.features.groups import GROUPS, JUDGES
from tests.e2e.features.session import Sequence, Session, map_sequences

TIMEOUT_S = 240
# What an engine imports, here and not in each fork.
IMPORTED = (
    "vllm.v1.engine.llm_engine",
    "vllm.v1.engine.core",
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.worker.cpu_model_runner",
    "vllm.model_executor.layers.quantization.online.base",
    "vllm.model_executor.models.llama",
    "vllm.model_executor.models.gemma3",
    "polykv_vllm.attention.backend",
)
Ask = Callable[[Session], Any]


def in_a_fork(model: Path, options: dict[str, Any], ask: Ask) -> Any:
    """Start an engine, ask it, stop it; an error is told and ends no other engine."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_serve, args=(theirs, model, options, ask))
    process.start()
    theirs.close()
    try:
        if not ours.poll(TIMEOUT_S):
            return {"error": f"no answer within {TIMEOUT_S} s"}
        return ours.recv()
    except EOFError:
        return {"error": "the process ended without an answer"}
    finally:
        process.kill()
        process.join()


def _serve(pipe: Connection, model: Path, options: dict[str, Any], ask: Ask) -> None:
    try:
        session = Session(model, options)
        pipe.send(ask(session))
        session.stop()
    except Exception:
        pipe.send({"error": traceback.format_exc()})


def main(directory: str, path: str, *names: str) -> None:
    """Run the groups (all of them unless named) and their judges; write the results."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["NUMBA_DISABLE_JIT"] = "1"  # compiling ngram lookup takes seconds
    for module in IMPORTED:
        importlib.import_module(module)
    gc.freeze()  # vLLM collects garbage several times while it starts

    models = Path(directory)
    results: dict[str, Any] = {}
    for name in names or GROUPS:
        group = GROUPS[name]
        results[name] = in_a_fork(
            models / group.model,
            group.options_in(models),
            lambda s, g=group: g.ask(s, models),
        )
    found: list[Sequence] = []
    map_sequences(results, found.append)
    for judge, (model, options) in JUDGES.items():
        mine = [sequence for sequence in found if sequence.judge == judge]
        if not mine:
            continue
        scores = in_a_fork(
            models / model,
            options,
            lambda s, mine=mine: [
                s.score(m.prompt + m.tokens, len(m.prompt)) for m in mine
            ],
        )
        if isinstance(scores, dict):
            results[f"judge {judge}"] = scores
            continue
        for sequence, score in zip(mine, scores, strict=True):
            sequence.judged = score
    Path(path).write_text(json.dumps(map_sequences(results, asdict)))


if __name__ == "__main__":
    main(*sys.argv[1:])

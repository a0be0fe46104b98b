# SPDX-License-Identifier: Apache-2.0
"""Runs an engine in this process, step by step, and looks into its scheduler.

A program of its own (`python -m tests.e2e.scheduling MODEL OPTIONS`, cases on the
standard input): an engine inside the test's process would leave its settings there.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

from polykv_vllm.metrics import get_recorder, worker_file

ROOT = Path(__file__).parent.parent.parent
NUM_TOKENS = 3  # generated, unless the case says otherwise


def run_cases(
    model: Path, options: dict[str, Any], cases: dict[str, Any]
) -> dict[str, Any]:
    """Run cases, cold each, in one engine.

    Args:
        model: The model's directory.
        options: Of vLLM's `EngineArgs`.
        cases: For each name {"requests": [...]} and optionally "stock": vLLM's own
            scheduler, "share": as the option `prefix_sharing`, but for this case,
            "num_tokens": how many each request generates. A request is
            {"prompt": token ids} and optionally the steps "arrival" and "abort",
            "priority", "sampling", "salt". The case ends when each request that is
            not aborted has its tokens; until then none of them is finished unless
            "finish" is set or its "sampling" says so.

    Returns:
        For each name what `_Steps.result` returns.

    """
    with tempfile.NamedTemporaryFile("r", suffix=".json") as results:
        subprocess.run(
            [sys.executable, "-m", __name__, str(model), json.dumps(options)],
            input=json.dumps(cases),
            text=True,
            check=True,
            cwd=ROOT,
            env={
                **os.environ,
                "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
                "POLYKV_RESULTS": results.name,
            },
        )
        return dict(json.load(results))


class Attention:
    """How the worker's batches were attended since this object was made."""

    def __init__(self) -> None:
        self.start = self._counters()
        self.max_prefixes = self.max_readers = 0

    @staticmethod
    def _counters() -> dict[str, float]:
        figures = get_recorder()._figures
        indices = {"shared": worker_file.SHARED_TOKENS} | worker_file.UNSHARED_TOKENS
        return {name: figures[index] for name, index in indices.items()}

    def see_last_step(self) -> None:
        """Look at the gauges, which tell of the last batch alone."""
        prefixes, readers = get_recorder()._figures[worker_file.GROUPS :][:2]
        self.max_prefixes = max(self.max_prefixes, int(prefixes))
        self.max_readers = max(self.max_readers, int(readers))

    def result(self) -> dict[str, Any]:
        import torch

        counters = self._counters()
        return {
            "threads": torch.get_num_threads(),
            "max_prefixes": self.max_prefixes,
            "max_readers": self.max_readers,
            "pairs": {name: n - self.start[name] for name, n in counters.items()},
        }


class _Steps:
    """One case: its requests by number, and what happened to them."""

    def __init__(self, engine: Any, case: dict[str, Any]):
        self.engine = engine
        self.core = engine.engine_core.engine_core
        self.requests: list[dict[str, Any]] = case["requests"]
        self.num_tokens = case.get("num_tokens", NUM_TOKENS)
        self.max_tokens = self.num_tokens if case.get("finish") else 200
        self.step = 0
        self.num_tokens_per_step: list[int] = []
        self.first_step: dict[str, int] = {}
        self.outputs: dict[str, Any] = {}
        self.num_scheduled: defaultdict[str, int] = defaultdict(int)
        self.num_preempted = 0
        self.max_duplicates = 0
        self.num_drafts = 0
        self.num_mixed_steps = 0
        self.attention = Attention()

    def run(self) -> None:
        waiting = {str(i) for i, r in enumerate(self.requests) if "abort" not in r}
        while waiting:
            for index, request in enumerate(self.requests):
                if request.get("arrival", 0) == self.step:
                    self._add(str(index), request)
                if request.get("abort") == self.step:
                    self.engine.abort_request([self._internal(str(index))])
            for output in self.engine.step():
                tokens = output.outputs[0].token_ids
                self.outputs[output.request_id] = output
                if tokens:
                    self.first_step.setdefault(output.request_id, self.step)
                if output.finished or len(tokens) >= self.num_tokens:
                    waiting.discard(output.request_id)
            self.step += 1
            assert self.step < 2000, f"no end for {waiting}"

    def _add(self, name: str, request: dict[str, Any]) -> None:
        from vllm import SamplingParams

        sampling = {
            "temperature": 0.0,
            "max_tokens": self.max_tokens,
            "ignore_eos": True,
            "detokenize": False,
            "logprobs": 0,
        } | request.get("sampling", {})
        prompt = {"prompt_token_ids": request["prompt"]}
        if "salt" in request:
            prompt["cache_salt"] = request["salt"]
        self.engine.add_request(
            name,
            prompt,
            SamplingParams(**sampling),
            priority=request.get("priority", 0),
        )

    def _internal(self, name: str) -> str:
        """vLLM appends a random part to a request's name."""
        names = self.core.scheduler.requests
        return next(n for n in names if n == name or n.startswith(f"{name}-"))

    def count(self, output: Any) -> None:
        """Take note of what was scheduled."""
        self.num_tokens_per_step.append(output.total_num_scheduled_tokens)
        self.num_preempted += len(output.preempted_req_ids or ())
        drafts = output.scheduled_spec_decode_tokens
        self.num_drafts += sum(map(len, drafts.values()))
        chunks = output.num_scheduled_tokens.values()
        self.num_mixed_steps += min(chunks, default=0) == 1 and max(chunks) > 16
        self.attention.see_last_step()
        for name, num_tokens in output.num_scheduled_tokens.items():
            self.num_scheduled[name.split("-")[0]] += num_tokens
        self.max_duplicates = max(self.max_duplicates, self._num_duplicates())

    def _num_duplicates(self) -> int:
        """Blocks of prompts beyond one for each hash, of requests that generate."""
        scheduler = self.core.scheduler
        blocks = {
            block.block_id: block.block_hash
            for request in scheduler.running
            if request.num_output_tokens > 0
            for manager in scheduler.kv_cache_manager.coordinator.single_type_managers
            for block in manager.req_to_blocks[request.request_id][
                : request.num_prompt_tokens // manager.block_size
            ]
            if block.block_hash is not None
        }
        return len(blocks) - len(set(blocks.values()))

    def tables(self) -> dict[str, list[list[int]]]:
        """Block ids of each request that runs, for each KV cache group."""
        scheduler = self.core.scheduler
        return {
            request.request_id: [
                list(ids)
                for ids in scheduler.kv_cache_manager.get_block_ids(request.request_id)
            ]
            for request in scheduler.running
        }

    def check_worker(self) -> None:
        """The worker's tables are those of the scheduler."""
        runner = self.core.model_executor.driver_worker.worker.model_runner
        for name, table in self.tables().items():
            state = runner.requests[name]
            # Blocks that left the window are dropped by the scheduler alone.
            for mine, theirs in zip(table, state.block_ids, strict=True):
                theirs = list(theirs)
                assert len(mine) >= len(theirs)
                pairs = zip(mine, theirs, strict=False)
                assert all(m in (t, 0) for m, t in pairs), (name, mine, theirs)
            index = runner.input_batch.req_id_to_index[name]
            for group, theirs in enumerate(state.block_ids):
                row = runner.input_batch.block_table[group].block_table.np[index]
                assert row[: len(theirs)].tolist() == list(theirs)

    def result(self) -> dict[str, Any]:
        live = sorted(self.outputs, key=int)
        return {
            "tables": {n.split("-")[0]: t for n, t in self.tables().items()},
            "first_step": self.first_step,
            "scheduled": dict(self.num_scheduled),
            "tokens_per_step": self.num_tokens_per_step,
            "preempted": self.num_preempted,
            "duplicates": self.max_duplicates,
            "drafts": self.num_drafts,
            "mixed_steps": self.num_mixed_steps,
            "attention": self.attention.result(),
            "tokens": {
                n: list(self.outputs[n].outputs[0].token_ids)[: self.num_tokens]
                for n in live
            },
            "logprobs": {
                n: [
                    next(iter(entry.values())).logprob
                    for entry in self.outputs[n].outputs[0].logprobs
                ][: self.num_tokens]
                for n in live
            },
        }

    def clear(self) -> None:
        """Abort what runs, and forget the cache."""
        names = list(self.core.scheduler.requests)
        self.core.abort_requests(names)
        self.engine.abort_request(names, internal=True)
        while self.core.scheduler.has_requests():
            self.engine.step()
        pool = self.core.scheduler.kv_cache_manager.block_pool
        assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1, "blocks leaked"
        assert self.core.scheduler.reset_prefix_cache()


def _run(engine: Any, case: dict[str, Any]) -> dict[str, Any]:
    from vllm.v1.core.sched.scheduler import Scheduler

    scheduler = engine.engine_core.engine_core.scheduler
    own = type(scheduler)
    if case.get("stock"):
        scheduler.__class__ = Scheduler
    if "share" in case:
        executor = engine.engine_core.engine_core.model_executor
        for groups in executor.driver_worker.worker.model_runner.attn_groups:
            for group in groups:
                for builder in group.metadata_builders:
                    builder._planner._enabled = case["share"]
    steps = _Steps(engine, case)
    schedule = scheduler.schedule

    def counting(*args: Any, **kwargs: Any) -> Any:
        output = schedule(*args, **kwargs)
        steps.count(output)
        return output

    scheduler.schedule = counting
    try:
        steps.run()
        steps.check_worker()
        result = steps.result()
        result["scheduler"] = type(scheduler).__name__
        steps.clear()
        return result
    finally:
        del scheduler.schedule
        scheduler.__class__ = own


def main(model: str, options: str) -> None:
    """Read the cases, write their results."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    settings = {
        "kv_cache_dtype": "polykv",
        "enforce_eager": True,
        "kv_cache_memory_bytes": 64 << 20,
        "disable_log_stats": True,
    } | json.loads(options)
    engine = LLMEngine.from_engine_args(EngineArgs(model=model, **settings))
    cases = json.load(sys.stdin)
    results = {name: _run(engine, case) for name, case in cases.items()}
    Path(os.environ["POLYKV_RESULTS"]).write_text(json.dumps(results))


if __name__ == "__main__":
    main(*sys.argv[1:])

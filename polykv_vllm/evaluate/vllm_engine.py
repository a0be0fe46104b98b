# SPDX-License-Identifier: Apache-2.0
"""`Engine` on the real vLLM: one arm in processes of its own, ended with `close`."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict
from typing import Any

import numpy as np

from polykv_vllm.bench.cpus import plan_cpus
from polykv_vllm.capacity import DEFAULT_BLOCK_SIZE, load_config
from polykv_vllm.evaluate.arms import Arm
from polykv_vllm.evaluate.engine import Generation, ScoreRequest, TokenScores
from polykv_vllm.evaluate.errors import EngineError
from polykv_vllm.evaluate.setup import EngineSetup, window_bytes
from polykv_vllm.process import ProcessGroup

_MODULE = "polykv_vllm.evaluate.engine_process"
_SHUTDOWN_S = 20.0
_BATCH_TOKENS = 2048
_SPARE_BLOCKS = 4  # for each request: begun blocks, and one more in each KV group
_LEAST_CACHE_BYTES = 64 << 20


class VllmEngine:
    """A started engine.

    Args:
        setup: Common to all arms.
        arm: Whose cache it has.
        bytes_per_token: Of the arm's cache, all layers.
        stage: Told in a few words what is being done.

    Raises:
        EngineError: It did not start; the message has the end of its log.

    """

    def __init__(
        self,
        setup: EngineSetup,
        arm: Arm,
        bytes_per_token: int,
        stage: Callable[[str], None] = lambda words: None,
    ) -> None:
        self.tokenizer = setup.tokenizer
        self.bytes_per_token = bytes_per_token
        self._arm = arm
        self._owed = 0  # answers that were not yet read
        read_end, write_end = os.pipe()
        with ExitStack() as on_failure:
            self._answers = on_failure.enter_context(os.fdopen(read_end))
            self._group = ProcessGroup(
                setup.logs / f"{arm.name}.log", _environment(setup.threads)
            )
            on_failure.enter_context(self._group)
            command = [sys.executable, "-m", _MODULE, str(write_end)]
            try:
                process = self._group.start(
                    command, stdin=subprocess.PIPE, pass_fds=[write_end]
                )
            finally:
                os.close(write_end)
            assert process.stdin is not None
            self._orders = on_failure.enter_context(process.stdin)
            stage("starting the engine")
            self._send(
                options=_llm_options(setup, arm, bytes_per_token),
                states=str(setup.states.absolute()),
                is_reference=arm.is_reference,
            )
            self.facts: dict[str, Any] = self._receive()
            self._resources = on_failure.pop_all()

    def score(self, requests: Sequence[ScoreRequest]) -> Iterator[TokenScores]:
        """Yield the scores of each request, in order, as they are computed.

        Raises:
            EngineError: The engine died or refused, and why.

        """
        orders = [asdict(request) for request in requests]
        self._send(len(orders), order="score", requests=orders)
        for _ in requests:
            scores = self._receive()
            yield TokenScores(
                np.asarray(scores["nll"], np.float32),
                None
                if scores["kld"] is None
                else np.asarray(scores["kld"], np.float32),
                None
                if scores["agrees"] is None
                else np.asarray(scores["agrees"], bool),
            )

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_tokens: int,
        stop: Sequence[str] = (),
    ) -> list[Generation]:
        """Answer prompts greedily, all of them in one batch.

        Raises:
            EngineError: The engine died or refused, and why.

        """
        self._send(
            order="generate",
            prompts=[list(prompt) for prompt in prompts],
            max_tokens=max_tokens,
            stop=list(stop),
        )
        return [
            Generation(**{**answer, "token_ids": tuple(answer["token_ids"])})
            for answer in self._receive()
        ]

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes."""
        self._send(order="reset")
        self._receive()

    def close(self) -> None:
        """End the engine and every process it started."""
        try:
            with suppress(BrokenPipeError):
                self._orders.close()
            if not self._owed:  # it is idle and ends by itself, for its input did
                self._group.exit_code(_SHUTDOWN_S)
        finally:
            self._resources.close()

    def _send(self, answers: int = 1, **message: Any) -> None:
        if self._owed:
            raise EngineError(
                f"{self._arm.name}: {self._owed} scores of the request before were not "
                "taken: read them all before the next"
            )
        self._owed = answers
        with suppress(BrokenPipeError):  # it died; that no answer comes says so
            self._orders.write(json.dumps(message).encode() + b"\n")
            self._orders.flush()

    def _receive(self) -> Any:
        line = self._answers.readline()
        self._owed -= 1
        if not line:
            self._group.exit_code(_SHUTDOWN_S)
            raise EngineError(
                f"the engine of {self._arm.name} ended:\n{self._group.explanation()}"
            )
        message = json.loads(line)
        if "error" in message:
            self._owed = 0
            raise EngineError(f"{self._arm.name}: {message['error']}")
        return message["value"]


def _environment(threads: int | None) -> dict[str, str]:
    """Return variables for the engine: which CPUs compute."""
    return {} if threads is None else plan_cpus(threads).environment


def _llm_options(setup: EngineSetup, arm: Arm, bytes_per_token: int) -> dict[str, Any]:
    """Return the keyword arguments of `vllm.LLM`."""
    demand = setup.demand
    spare = demand.num_seqs * _SPARE_BLOCKS * DEFAULT_BLOCK_SIZE
    cache_bytes = max(
        bytes_per_token * (demand.live_tokens + spare), _LEAST_CACHE_BYTES
    )
    additional_config = arm.additional_config
    if arm.windows is not None:
        config = load_config(setup.model).get_text_config()
        cache_bytes += demand.num_seqs * window_bytes(config, arm)
        additional_config["polykv"]["windows"]["max_sequences"] = demand.num_seqs
    return {
        "model": setup.model,
        "dtype": arm.dtype,
        "kv_cache_dtype": arm.kv_cache_dtype,
        "additional_config": additional_config,
        "enforce_eager": True,
        "enable_prefix_caching": True,
        "max_model_len": min(demand.request_tokens + 1, setup.context_tokens),
        "max_num_seqs": demand.num_seqs,
        "max_num_batched_tokens": max(_BATCH_TOKENS, demand.num_seqs),
        "kv_cache_memory_bytes": cache_bytes,
        "seed": 0,
    }

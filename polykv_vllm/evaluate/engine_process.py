# SPDX-License-Identifier: Apache-2.0
"""One arm's engine: a process with an `LLM` that takes orders.

Orders are JSON lines on standard input, answers JSON lines on the descriptor given as
first argument (vLLM logs to standard output): `{"value": ...}` or `{"error": ...}`.
The first line has the engine's options. It ends when its input ends.
"""

import json
import os
import sys
from collections.abc import Iterator
from typing import Any

from polykv_vllm.process import signals_unwind

WORKER = "polykv_vllm.evaluate.worker.EvaluationWorker"

Request = dict[str, Any]  # of a ScoreRequest, by name, and "prompt"


class OrderError(RuntimeError):
    """An order cannot be carried out; the engine lives on."""


class EngineProcess:
    """The engine and the orders it understands.

    Args:
        options: Keyword arguments of `vllm.LLM`.
        states: Folder of the reference's hidden states.
        is_reference: Whether this engine writes them.

    """

    def __init__(
        self, options: dict[str, Any], states: str, is_reference: bool
    ) -> None:
        from vllm import LLM

        self._llm = LLM(**options, worker_extension_cls=WORKER)
        config = self._llm.llm_engine.vllm_config
        self._block_size = config.cache_config.block_size
        self._max_model_len = config.model_config.max_model_len
        self._batch_tokens = config.scheduler_config.max_num_batched_tokens
        self._num_seqs = config.scheduler_config.max_num_seqs
        self.facts = {
            "block_size": self._block_size,
            "num_blocks": config.cache_config.num_gpu_blocks,
            **self._call("polykv_eval_start", states, is_reference),
        }

    def score(self, requests: list[Request]) -> Iterator[dict[str, Any]]:
        """Yield the scores of each request."""
        for request in requests:
            tokens = request["token_ids"]
            # One token is generated: where there is no place for it, it takes that of
            # the last one, which is to be predicted and need not be computed.
            is_full = len(tokens) == self._max_model_len
            request["prompt"] = tokens[:-1] if is_full else tokens
        for window in self._windows(requests):
            yield from self._score_window(window)

    def _score_window(self, window: list[Request]) -> Iterator[dict[str, Any]]:
        from vllm import SamplingParams

        expected = [
            {
                "prompt": each["prompt"],
                "key": each["key"],
                "tokens": each["token_ids"],
                "begin": each["begin"],
            }
            for each in window
        ]
        self._call("polykv_eval_expect", expected)
        params = [
            SamplingParams(
                temperature=0,
                max_tokens=1,
                detokenize=False,
                skip_reading_prefix_cache=not each["cached_tokens"],
            )
            for each in window
        ]
        for request, cached in zip(window, self._cached(window, params), strict=True):
            self._check_cached(request, cached)
            yield self._call("polykv_eval_scores", request["prompt"])

    def _cached(self, window: list[Request], params: list[Any]) -> list[int]:
        """Run the requests; return how many tokens each read from the cache."""
        prompts: Any = [{"prompt_token_ids": each["prompt"]} for each in window]
        outputs = self._llm.generate(prompts, params, use_tqdm=False)
        return [output.num_cached_tokens or 0 for output in outputs]

    def _check_cached(self, request: Request, cached: int) -> None:
        asked = request["cached_tokens"]
        if cached < asked // self._block_size * self._block_size:
            raise OrderError(
                f"{request['key']}: {asked} leading tokens should have been in the "
                f"prefix cache, {cached} were (blocks of {self._block_size} tokens): "
                "an earlier request must bring them there, and the cache must hold them"
            )

    def _windows(self, requests: list[Request]) -> Iterator[list[Request]]:
        """Yield requests that run together: what fits into one step.

        One that reads the cache comes after those that fill it; equal prompts are kept
        apart, for the worker knows a request by its prompt.
        """
        window: list[Request] = []
        tokens = 0
        for request in requests:
            own = len(request["prompt"]) - request["cached_tokens"]
            if window and (
                len(window) == self._num_seqs
                or tokens + own > self._batch_tokens
                or (request["cached_tokens"] and not window[-1]["cached_tokens"])
                or any(request["prompt"] == each["prompt"] for each in window)
            ):
                yield window
                window, tokens = [], 0
            window.append(request)
            tokens += own
        if window:
            yield window

    def generate(
        self, prompts: list[list[int]], max_tokens: int, stop: list[str]
    ) -> Iterator[list[dict[str, Any]]]:
        """Yield once: the greedy answers to all prompts."""
        from vllm import SamplingParams

        params = SamplingParams(temperature=0, max_tokens=max_tokens, stop=stop or None)
        inputs: Any = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = self._llm.generate(inputs, params, use_tqdm=False)
        yield [
            {
                "token_ids": list(output.outputs[0].token_ids),
                "text": output.outputs[0].text,
                "cached_tokens": output.num_cached_tokens or 0,
                "finish_reason": output.outputs[0].finish_reason,
            }
            for output in outputs
        ]

    def reset(self) -> Iterator[None]:
        """Yield once, with all cached prefixes forgotten."""
        if not self._llm.reset_prefix_cache():
            raise OrderError("the prefix cache is in use and was not reset")
        yield None

    def close(self) -> None:
        """End the engine's own processes."""
        self._llm.llm_engine.engine_core.shutdown()

    def _call(self, method: str, *arguments: Any) -> Any:
        """Call a method of `EvaluationWorker`."""
        return self._llm.collective_rpc(method, args=arguments)[0]


def main() -> None:
    """Serve orders until the input ends."""
    answers = os.fdopen(int(sys.argv[1]), "w")

    def answer(**message: Any) -> None:
        answers.write(json.dumps(message) + "\n")
        answers.flush()

    with signals_unwind():
        engine = EngineProcess(**json.loads(sys.stdin.readline()))
        try:
            answer(value=engine.facts)
            for line in sys.stdin:
                order = json.loads(line)
                try:
                    for value in getattr(engine, order.pop("order"))(**order):
                        answer(value=value)
                except Exception as error:
                    answer(error=f"{type(error).__name__}: {error}")
        finally:
            engine.close()


if __name__ == "__main__":
    main()

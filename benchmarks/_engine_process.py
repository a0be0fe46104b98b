# SPDX-License-Identifier: Apache-2.0
"""One arm of the engine benchmark: a process with an `LLM` that takes orders.

Orders are JSON lines on standard input, answers JSON lines on the descriptor given as
first argument (vLLM logs to standard output). It ends when its input ends.
"""

import json
import os
import sys
from typing import Any


class EngineArm:
    """The engine and the orders it understands."""

    def __init__(self, options: dict[str, Any]) -> None:
        from vllm import LLM

        self._llm = LLM(**options, disable_log_stats=False, seed=0)

    def describe(self) -> dict[str, Any]:
        """Return the size of the cache and what computes the attention."""
        config = self._llm.llm_engine.vllm_config.cache_config
        return {
            "capacity_tokens": config.num_gpu_blocks * config.block_size,
            "block_size": config.block_size,
            "attention": self.rpc("bench_attention"),
        }

    def generate(self, prompt: list[int], tokens: int) -> dict[str, Any]:
        """Run one request of `prompt` for exactly `tokens` tokens.

        Returns:
            Seconds from scheduling to the first token, seconds from the first token
            to the last, and how many prompt tokens came from the prefix cache.

        """
        from vllm import SamplingParams, TokensPrompt

        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        request = TokensPrompt(prompt_token_ids=prompt)
        (result,) = self._llm.generate([request], params, use_tqdm=False)
        times = result.metrics
        return {
            "prefill_s": times.first_token_ts - times.scheduled_ts,
            "decode_s": times.last_token_ts - times.first_token_ts,
            "tokens": len(result.outputs[0].token_ids),
            "cached_tokens": result.num_cached_tokens,
        }

    def reset(self) -> bool:
        """Empty the prefix cache."""
        return self._llm.reset_prefix_cache()

    def rpc(self, method: str) -> Any:
        """Call a method of _worker.py in the worker."""
        return self._llm.collective_rpc(method)[0]


def main() -> None:
    """Serve orders until the input ends."""
    answers = os.fdopen(int(sys.argv[1]), "w")
    arm = EngineArm(json.loads(sys.stdin.readline()))

    def answer(value: Any) -> None:
        answers.write(json.dumps(value) + "\n")
        answers.flush()

    answer(arm.describe())
    for line in sys.stdin:
        order = json.loads(line)
        answer(getattr(arm, order.pop("order"))(**order))


if __name__ == "__main__":
    main()

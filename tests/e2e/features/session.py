# SPDX-License-Identifier: Apache-2.0
"""One engine inside this process, and short questions to it."""

import gc
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

CACHE_DTYPE = "polykv_k7v4"
BLOCK_SIZE = 32
OPTIONS = {
    "kv_cache_dtype": CACHE_DTYPE,
    "dtype": "float32",  # so that errors show
    "block_size": BLOCK_SIZE,
    "max_model_len": 1024,
    "max_num_seqs": 8,
    "enforce_eager": True,
    "kv_cache_memory_bytes": 16 << 20,
    "disable_log_stats": False,
    "worker_extension_cls": "tests.e2e.worker_extension.TestExtension",
}


@dataclass
class Sequence:
    """What an engine did with a prompt.

    Attributes:
        prompt: Token ids.
        tokens: Generated token ids.
        logprobs: Of the generated tokens, as the engine gave them with the tokens.
        cached: Tokens of the prompt that it found in its cache.
        judge: The engine that scores the same tokens: see `groups.JUDGES`.
        judged: What that engine gave for the same tokens, in one piece.

    """

    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]
    cached: int = 0
    judge: str = "plain"
    judged: list[float] | None = None

    @property
    def difference(self) -> float:
        """Largest difference of two log-probabilities of a token."""
        assert self.judged is not None and self.tokens
        pairs = zip(self.logprobs, self.judged, strict=True)
        return max(abs(a - b) for a, b in pairs)


class Session:
    """An `LLM` whose engine core and worker are in this process."""

    def __init__(self, model: Path, options: dict[str, Any]):
        from vllm import LLM

        self.llm = LLM(model=str(model), **OPTIONS | options)
        self.core = self.llm.llm_engine.engine_core.engine_core

    def stop(self) -> None:
        self.llm.llm_engine.engine_core.shutdown()
        del self.llm, self.core
        gc.collect()

    @property
    def config(self) -> Any:
        return self.llm.llm_engine.vllm_config

    def counter(self, name: str) -> int:
        """Value of a counter such as "vllm:num_preemptions"."""
        return sum(m.value for m in self.llm.get_metrics() if m.name == name)

    def generate(
        self, prompts: list[Any], judge: str = "plain", lora: Any = None, **more: Any
    ) -> list[Sequence]:
        """Complete prompts greedily, all in one batch."""
        return [
            self.sequence(output, judge)
            for output in self.outputs(prompts, lora=lora, **more)
        ]

    def outputs(self, prompts: list[Any], lora: Any = None, **more: Any) -> list[Any]:
        """Return vLLM's own outputs; a prompt is token ids or what `LLM` takes."""
        from vllm import SamplingParams

        defaults = {"temperature": 0.0, "max_tokens": 16, "ignore_eos": True}
        sampling = SamplingParams(**defaults | {"logprobs": 0} | more)
        inputs = [
            {"prompt_token_ids": prompt} if isinstance(prompt, list) else prompt
            for prompt in prompts
        ]
        return list(
            self.llm.generate(inputs, sampling, lora_request=lora, use_tqdm=False)
        )

    @staticmethod
    def sequence(output: Any, judge: str = "plain") -> Sequence:
        completion = output.outputs[0]
        tokens = list(completion.token_ids)
        entries = zip(tokens, completion.logprobs, strict=True)
        return Sequence(
            list(output.prompt_token_ids or ()),
            tokens,
            [float(entry[token].logprob) for token, entry in entries],
            output.num_cached_tokens,
            judge,
        )

    def score(self, tokens: list[int], start: int = 1) -> list[float]:
        """Log-probability of each token from `start` on; computes all of them."""
        (output,) = self.outputs([tokens], max_tokens=1, prompt_logprobs=0)
        entries = zip(tokens[start:], output.prompt_logprobs[start:], strict=True)
        return [float(entry[token].logprob) for token, entry in entries]


def map_sequences(value: Any, change: Callable[[Any], Any]) -> Any:
    """Apply `change` to each `Sequence`, or its dictionary, in a nested result."""
    if isinstance(value, Sequence):
        return change(value)
    if isinstance(value, dict):
        if value.keys() == asdict(Sequence([], [], [])).keys():
            return change(value)
        return {k: map_sequences(v, change) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [map_sequences(v, change) for v in value]
    return value

# SPDX-License-Identifier: Apache-2.0
"""Starts engines and asks them for log-probabilities."""

import gc
from pathlib import Path
from typing import Any

from tests.e2e.forked import forked_engine

KV_CACHE_BYTES = 128 << 20
UNIT = {"bfloat16": 2**-9, "float16": 2**-12, "float32": 2**-14}
"""Relative rounding error of one attention output: of 16 bits themselves, or in fp32
the kernels' own (see tests/csrc)."""


def fast_dtype() -> str:
    """Return what this CPU multiplies fast: one without bf16 products emulates them.

    For tests that compute thousands of tokens with a real model, in a quarter of the
    time; the others take bfloat16 everywhere.
    """
    import torch

    return "bfloat16" if torch.cpu._is_avx512_bf16_supported() else "float32"


class Engine:
    """An `LLM` with short questions to it; a context manager that stops it."""

    def __init__(self, model: Path, kv_cache_dtype: str = "polykv", **options: Any):
        from vllm import LLM

        defaults = {
            "enforce_eager": True,
            "kv_cache_memory_bytes": KV_CACHE_BYTES,
            "max_model_len": 2048,
            "max_num_seqs": 8,
            "disable_log_stats": False,
            "worker_extension_cls": "tests.e2e.worker_extension.TestExtension",
        }
        options = defaults | options
        with forked_engine():
            self.llm = LLM(model=str(model), kv_cache_dtype=kv_cache_dtype, **options)

    def stop(self) -> None:
        """End the engine's processes."""
        self.llm.llm_engine.engine_core.shutdown()
        del self.llm
        gc.collect()

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    @property
    def cache_config(self) -> Any:
        return self.llm.llm_engine.vllm_config.cache_config

    def capacity_tokens(self) -> int:
        """Tokens that the cache holds, from the number of blocks."""
        return int(self.cache_config.num_gpu_blocks * self.cache_config.block_size)

    def tokenize(self, text: str) -> list[int]:
        return list(self.llm.get_tokenizer()(text)["input_ids"])

    def counter(self, name: str) -> int:
        """Value of a counter such as "vllm:num_preemptions"."""
        values = [m.value for m in self.llm.get_metrics() if m.name == name]
        assert values, f"no metric {name}"
        return sum(values)

    def generate(self, prompts: list[list[int]], **sampling: Any) -> list[Any]:
        """Complete prompts greedily; returns vLLM's `RequestOutput`s."""
        from vllm import SamplingParams

        params = SamplingParams(
            **{"temperature": 0.0, "max_tokens": 1, "detokenize": False} | sampling
        )
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        return list(self.llm.generate(inputs, params, use_tqdm=False))

    def score(
        self, prompt: list[int], read_cache: bool = False, max_tokens: int = 1
    ) -> "Score":
        """Log-probability of each prompt token, and of new ones, given the earlier."""
        (output,) = self.generate(
            [prompt],
            max_tokens=max_tokens,
            logprobs=0,
            prompt_logprobs=0,
            skip_reading_prefix_cache=not read_cache,
        )
        # Before the first token computed by this request vLLM has no scores.
        start = output.num_cached_tokens + 1
        tokens = [*prompt[start:], *output.outputs[0].token_ids]
        entries = [*output.prompt_logprobs[start:], *output.outputs[0].logprobs]
        scores = [
            float(entry[token].logprob)
            for token, entry in zip(tokens, entries, strict=True)
        ]
        return Score(output.num_cached_tokens, scores, tokens)

    def replay_difference(self, prompt: list[int], max_tokens: int = 1) -> float:
        """Largest difference of the scores between the kernels and the reference.

        Both attend to the same cached bytes; see `worker_extension`.
        """
        self.call("polykv_record")
        kernel = self.score(prompt, max_tokens=max_tokens)
        self.call("polykv_replay")
        reference = self.score(prompt, max_tokens=max_tokens)
        assert self.call("polykv_stop") > 0, "no layer used a polykv cache"
        assert kernel.tokens == reference.tokens, "another token was generated"
        assert len(kernel.logprobs) == len(prompt) + max_tokens - 1
        return kernel.max_difference(reference)

    def call(self, method: str, *args: Any) -> Any:
        """Call a method of the worker extension."""
        return self.llm.collective_rpc(method, args=args)[0]


def replay_tolerance(unit: float, num_layers: int) -> float:
    """Bound for `replay_difference`.

    Args:
        unit: Relative rounding error of one attention output, see `UNIT`.
        num_layers: Each layer adds an attention and an MLP to the residual stream;
            their errors are independent.

    """
    logit_range = 25.0  # nats between likely and unlikely tokens
    return unit * logit_range * (2 * num_layers) ** 0.5


class Score:
    """Log-probabilities of the tokens that a request computed itself."""

    def __init__(
        self, num_cached_tokens: int, logprobs: list[float], tokens: list[int]
    ):
        self.num_cached_tokens = num_cached_tokens
        self.logprobs = logprobs
        self.tokens = tokens

    def mean(self) -> float:
        return sum(self.logprobs) / len(self.logprobs)

    def max_difference(self, other: "Score") -> float:
        """Largest difference over the tokens that both computed; at least one."""
        return max(self._differences(other))

    def mean_difference(self, other: "Score") -> float:
        """Mean absolute difference over the tokens that both computed."""
        differences = self._differences(other)
        return sum(differences) / len(differences)

    def _differences(self, other: "Score") -> list[float]:
        count = min(len(self.logprobs), len(other.logprobs))
        assert count > 0
        pairs = zip(self.logprobs[-count:], other.logprobs[-count:], strict=True)
        return [abs(a - b) for a, b in pairs]

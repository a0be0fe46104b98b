# SPDX-License-Identifier: Apache-2.0
"""torch.compile, blocks of 32 tokens, and a cache too small for the requests."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.conftest import TEXT
from tests.e2e.harness import UNIT, Engine, fast_dtype, replay_tolerance

NUM_BLOCKS = 24
BLOCK_SIZE = 32
DTYPE = fast_dtype()


@pytest.fixture(scope="module")
def engine(smollm2: Path) -> Iterator[Engine]:
    options = {"block_size": BLOCK_SIZE, "num_gpu_blocks_override": NUM_BLOCKS}
    sizes = {"max_model_len": 640, "max_num_batched_tokens": 256, "dtype": DTYPE}
    with Engine(smollm2, enforce_eager=False, **options, **sizes) as engine:
        yield engine


def test_it_is_compiled(engine: Engine) -> None:
    mode = engine.llm.llm_engine.vllm_config.compilation_config.mode
    assert mode.name == "DYNAMO_TRACE_ONCE"


def test_steps_are_counted(engine: Engine) -> None:
    """Compiled code calls the layers as well, and `LLM.get_metrics` has our metrics."""
    before = engine.counter("vllm:polykv_steps")
    engine.generate([engine.tokenize(TEXT)[:40]], max_tokens=5)
    assert engine.counter("vllm:polykv_steps") - before == 5


def test_logprobs_equal_reference_attention(engine: Engine) -> None:
    prompt = engine.tokenize(TEXT)[:300]
    difference = engine.replay_difference(prompt)
    assert difference <= replay_tolerance(UNIT[DTYPE], num_layers=30)


def test_preempted_requests_go_on_correctly(engine: Engine) -> None:
    tokens = engine.tokenize(TEXT)
    prompts = [tokens[i * 40 : i * 40 + 150] for i in range(8)]
    outputs = engine.generate(prompts, max_tokens=100, logprobs=0, ignore_eos=True)
    assert engine.counter("vllm:num_preemptions") > 0
    for prompt, output in zip(prompts, outputs, strict=True):
        completion = output.outputs[0]
        assert len(completion.token_ids) == 100
        generated = [
            entry[token].logprob
            for token, entry in zip(
                completion.token_ids, completion.logprobs, strict=True
            )
        ]
        # The same tokens scored in one piece, never preempted. Single tokens differ
        # by the quantization error (other batches, other roundings, other codes:
        # about 0.1 nats each), the mean of 100 by a tenth of it.
        again = engine.score([*prompt, *completion.token_ids]).logprobs[-101:-1]
        mean_difference = (
            sum(a - b for a, b in zip(generated, again, strict=True)) / 100
        )
        assert abs(mean_difference) < 0.1

# SPDX-License-Identifier: Apache-2.0
"""Formats of two to four bits in the real engine, on a small model with random weights.

In fp32, so that errors of the kernels show beside what quantization loses.
"""

from pathlib import Path

import pytest

from tests.calibrate.models import calibrate_random
from tests.e2e.harness import Engine, replay_tolerance
from tests.random_models import VOCABULARY, save_model, save_random_model

PROMPT = [(7 * i * i + i) % VOCABULARY for i in range(300)]
SHARED = [(3 * i * i + 5 * i) % VOCABULARY for i in range(256)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three layers with biases, two KV heads of 128."""
    folder = tmp_path_factory.mktemp("low_bit")
    return save_model(folder, "qwen2", {"hidden_size": 512})


@pytest.mark.parametrize("kv_cache_dtype", ["polykv_k2v2", "polykv_k3v3"])
def test_engine(kv_cache_dtype: str, model: Path) -> None:
    """Kernels equal the reference, a hit a miss, and agents share their prefix."""
    options = {"skip_tokenizer_init": True, "dtype": "float32", "block_size": 32}
    with Engine(model, kv_cache_dtype, max_num_batched_tokens=288, **options) as engine:
        assert engine.replay_difference(PROMPT) <= replay_tolerance(2**-14, 3)
        miss = engine.score(PROMPT)
        hit = engine.score(PROMPT, read_cache=True)
        assert hit.num_cached_tokens == 288
        assert hit.max_difference(miss) == 0.0
        agents = [[*SHARED, *PROMPT[i : i + 9]] for i in range(5)]
        together = engine.generate(agents, max_tokens=12)
        for agent, output in zip(agents, together, strict=True):
            (alone,) = engine.generate([agent], max_tokens=12)
            assert output.outputs[0].token_ids == alone.outputs[0].token_ids


def test_calibrated_engine(tmp_path: Path) -> None:
    """Matrices for keys, values folded: no product moves but by what is quantized."""
    folder = tmp_path / "model"
    network = save_random_model(folder, "qwen2")
    calibrate_random(network, folder / "polykv")
    options = {"skip_tokenizer_init": True, "dtype": "float32", "block_size": 32}
    with Engine(folder, "auto", **options) as stock:
        exact = stock.score(PROMPT)
    with Engine(folder, "polykv_k4v4", max_num_batched_tokens=288, **options) as engine:
        transforms = engine.call("polykv_key_transforms")
        assert {treatment for treatment, _ in transforms.values()} == {"matrix"}
        assert engine.replay_difference(PROMPT) <= replay_tolerance(2**-14, 3)
        miss = engine.score(PROMPT)
        hit = engine.score(PROMPT, read_cache=True)
    assert hit.num_cached_tokens == 288
    assert hit.max_difference(miss) == 0.0
    assert 0 < miss.max_difference(exact) < 0.5

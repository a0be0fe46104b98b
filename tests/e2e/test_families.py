# SPDX-License-Identifier: Apache-2.0
"""Small models of each family with random weights, in fp32 so that errors show."""

from pathlib import Path
from typing import Any

import pytest

from tests.e2e.harness import Engine, replay_tolerance
from tests.random_models import SHAPE

VOCABULARY = SHAPE["vocab_size"]
FAMILIES = {
    "llama-64-group3": ("llama", {"hidden_size": 192, "num_attention_heads": 3}),
    "qwen2-128": ("qwen2", {"hidden_size": 512}),
    "qwen3-128": ("qwen3", {"head_dim": 128}),
}


def save_model(directory: Path, family: str, changes: dict[str, Any]) -> Path:
    """Write a model with random weights and no tokenizer."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **SHAPE | changes)
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    return directory


@pytest.mark.parametrize("name", FAMILIES)
def test_family(name: str, tmp_path: Path) -> None:
    model = save_model(tmp_path, *FAMILIES[name])
    cache_dtype = "polykv_k7v4" if "128" in name else "polykv_k8v4"
    options = {"skip_tokenizer_init": True, "dtype": "float32", "block_size": 32}
    # A chunk of 288 tokens and one of 12: what a hit leaves too.
    prompt = [(7 * i * i + i) % VOCABULARY for i in range(300)]
    with Engine(model, cache_dtype, max_num_batched_tokens=288, **options) as engine:
        assert engine.replay_difference(prompt) <= replay_tolerance(2**-14, 3)
        miss = engine.score(prompt)
        hit = engine.score(prompt, read_cache=True)
    assert hit.num_cached_tokens == 288
    assert hit.max_difference(miss) == 0.0

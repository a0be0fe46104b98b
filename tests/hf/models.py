# SPDX-License-Identifier: Apache-2.0
"""Small random models of the families that are served, and a tokenizer for them."""

from typing import Any

import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

WINDOW = 48
_SIZES: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}

FAMILIES = ("llama", "qwen2", "qwen3", "gemma3")


def tiny_model(family: str, **changes: Any) -> PreTrainedModel:
    """Return an fp32 model with random weights, biases and norms."""
    sizes = _SIZES | changes
    if family == "llama":
        model = LlamaForCausalLM(LlamaConfig(**sizes))
    elif family == "qwen2":
        model = Qwen2ForCausalLM(Qwen2Config(**sizes))
    elif family == "qwen3":
        model = Qwen3ForCausalLM(Qwen3Config(**sizes))
    else:
        types = ["sliding_attention", "full_attention", "sliding_attention"]
        config = Gemma3TextConfig(
            **sizes, layer_types=types, sliding_window=WINDOW, query_pre_attn_scalar=80
        )
        model = Gemma3ForCausalLM(config)
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        # Weights large enough that attention is not flat, norms and biases that matter.
        parameter.data = noise * 0.15 + (1.0 if name.endswith("norm.weight") else 0.0)
    return model.eval()


def tokens(count: int, rows: int = 1, seed: int = 0) -> torch.Tensor:
    """Return `[rows, count]` random tokens, none of them special."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 128, (rows, count), generator=generator)


class Characters:
    """A tokenizer of single characters, as far as a pool needs one."""

    pad_token_id = 0
    eos_token_id = 2

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, Any]:
        ids = [3 + ord(c) % 125 for c in text]
        return {"input_ids": [1] * add_special_tokens + ids}

    def batch_decode(self, rows: torch.Tensor, skip_special_tokens: bool) -> list[str]:
        return [" ".join(str(i) for i in row if i > 2) for row in rows.tolist()]

# SPDX-License-Identifier: Apache-2.0
"""The table of model families: what is served, and what is refused.

Each served case is a small model with random weights that `tests/e2e/test_families.py`
runs on the engine; each refused one is a config. docs/support.md is written from both
(`tests/support_document.py`).
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

VOCABULARY = 512
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
SLIDING = {"sliding_window": 64}
FULL_AND_SLIDING = {
    **SLIDING,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
}
_SHAPE: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "initializer_range": 0.07,
    "max_position_embeddings": 2048,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@dataclass(frozen=True)
class Family:
    """One small model.

    Attributes:
        model_type: As in transformers.
        architecture: The class of the model, as in the config.
        changes: Of the config, against the common shape; None takes a key out.
        kv_cache_dtype: The format it is served with.
        dtype: Of the activations.
        note: What is special, for docs/support.md.
        options: Of the engine.

    """

    model_type: str
    architecture: str
    changes: dict[str, Any] = field(default_factory=dict)
    kv_cache_dtype: str = "polykv_k8v8"
    dtype: str = "float32"
    note: str = ""
    options: dict[str, Any] = field(default_factory=dict)

    def config(self) -> Any:
        """Return the transformers config."""
        from transformers import AutoConfig

        values = {k: v for k, v in (_SHAPE | self.changes).items() if v is not None}
        config = AutoConfig.for_model(self.model_type, **values)
        config.architectures = [self.architecture]
        return config


SERVED: dict[str, Family] = {
    "llama": Family(
        "llama",
        "LlamaForCausalLM",
        {"hidden_size": 192, "num_attention_heads": 3, "num_key_value_heads": 1},
        "polykv_k8v4",
    ),
    "llama-bf16": Family("llama", "LlamaForCausalLM", {}, "polykv_k8v3", "bfloat16"),
    "llama-fp16": Family("llama", "LlamaForCausalLM", {}, "polykv_k7v4", "float16"),
    "mistral": Family("mistral", "MistralForCausalLM", SLIDING),
    "mixtral": Family("mixtral", "MixtralForCausalLM", {"num_local_experts": 4}),
    "qwen2": Family(
        "qwen2",
        "Qwen2ForCausalLM",
        {"hidden_size": 512, "initializer_range": 0.05},
        "polykv_k7v4",
    ),
    "qwen2-moe": Family(
        "qwen2_moe",
        "Qwen2MoeForCausalLM",
        {**MOE, "shared_expert_intermediate_size": 128},
    ),
    "qwen3": Family("qwen3", "Qwen3ForCausalLM", {"head_dim": 128}, "polykv_k7v4"),
    "qwen3-moe": Family("qwen3_moe", "Qwen3MoeForCausalLM", {**MOE, "head_dim": 64}),
    "phi3": Family("phi3", "Phi3ForCausalLM", SLIDING),
    "phi4-mini": Family(
        "phi3",
        "Phi3ForCausalLM",
        {
            "hidden_size": 512,
            "num_key_value_heads": 1,
            "partial_rotary_factor": 0.75,
            "sliding_window": None,
        },
        note="a part of the channels is rotated",
    ),
    "phi": Family(
        "phi",
        "PhiForCausalLM",
        {"num_key_value_heads": None},
        note="half of the channels are rotated",
    ),
    "gemma": Family("gemma", "GemmaForCausalLM", {"head_dim": 256}),
    "gemma3-text": Family(
        "gemma3_text", "Gemma3ForCausalLM", {**FULL_AND_SLIDING, "head_dim": 256}
    ),
    "gpt-neox": Family(
        "gpt_neox",
        "GPTNeoXForCausalLM",
        {"num_key_value_heads": None},
        note="a quarter of the channels is rotated",
    ),
    "olmo": Family("olmo", "OlmoForCausalLM"),
    "olmo2": Family("olmo2", "Olmo2ForCausalLM"),
    "olmo3": Family("olmo3", "Olmo3ForCausalLM", FULL_AND_SLIDING),
    "falcon-7b": Family(
        "falcon",
        "FalconForCausalLM",
        {"num_key_value_heads": None, "multi_query": True, "bias": False},
        note="parallel attention and MLP",
    ),
    "falcon-40b": Family(
        "falcon",
        "FalconForCausalLM",
        {
            "num_key_value_heads": None,
            "new_decoder_architecture": True,
            "num_kv_heads": 2,
            "bias": False,
        },
    ),
    "qwen3-next": Family(
        "qwen3_next",
        "Qwen3NextForCausalLM",
        {
            **MOE,
            "num_hidden_layers": 4,
            "head_dim": 128,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 64,
            "linear_value_head_dim": 64,
            "shared_expert_intermediate_size": 128,
        },
        dtype="bfloat16",
        note="vLLM's linear attention on the CPU takes bf16 only",
    ),
}


def save_family(directory: Path, family: Family) -> Path:
    """Write the model with random weights, norms and biases, and no tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(family.config())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.2)
            elif name.endswith("bias"):
                parameter.normal_(0, 0.2)
    model.save_pretrained(directory)
    return directory

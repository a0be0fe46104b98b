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
        refused: A part of the reason why it is not served.

    """

    model_type: str
    architecture: str
    changes: dict[str, Any] = field(default_factory=dict)
    kv_cache_dtype: str = "polykv_k8v8"
    dtype: str = "float32"
    note: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    refused: str = ""

    @property
    def is_moe(self) -> bool:
        """Whether tokens choose experts."""
        return "num_experts_per_tok" in self.changes

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
    "mistral": Family(
        "mistral",
        "MistralForCausalLM",
        {
            **SLIDING,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "head_dim": 64,
        },
    ),
    "mixtral": Family(
        "mixtral",
        "MixtralForCausalLM",
        {"num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "qwen2": Family(
        "qwen2",
        "Qwen2ForCausalLM",
        {"hidden_size": 896, "num_attention_heads": 14, "initializer_range": 0.04},
        "polykv_k7v4",
    ),
    "qwen2-moe": Family(
        "qwen2_moe",
        "Qwen2MoeForCausalLM",
        {**MOE, "shared_expert_intermediate_size": 128},
    ),
    "qwen3": Family(
        "qwen3",
        "Qwen3ForCausalLM",
        {"head_dim": 128, "num_attention_heads": 8, "num_key_value_heads": 1},
        "polykv_k7v4",
    ),
    "qwen3-moe": Family("qwen3_moe", "Qwen3MoeForCausalLM", {**MOE, "head_dim": 64}),
    "phi3": Family("phi3", "Phi3ForCausalLM", {**SLIDING, "hidden_size": 384}),
    "phi4-mini": Family(
        "phi3",
        "Phi3ForCausalLM",
        {
            "hidden_size": 512,
            "initializer_range": 0.05,
            "num_key_value_heads": 1,
            "partial_rotary_factor": 0.75,
            "sliding_window": None,
        },
        note="a part of the channels is rotated",
    ),
    "phi": Family(
        "phi",
        "PhiForCausalLM",
        {"num_key_value_heads": None, "hidden_size": 320},
        note="half of the channels are rotated",
    ),
    "gemma": Family("gemma", "GemmaForCausalLM", {"head_dim": 256}),
    "gemma2": Family(
        "gemma2",
        "Gemma2ForCausalLM",
        {
            **FULL_AND_SLIDING,
            "head_dim": 256,
            "query_pre_attn_scalar": 64,
            "attn_logit_softcapping": 2.0,
        },
        note="a soft cap",
    ),
    "gemma3-text": Family(
        "gemma3_text", "Gemma3ForCausalLM", {**FULL_AND_SLIDING, "head_dim": 256}
    ),
    "gemma4-text": Family(
        "gemma4_text",
        "Gemma4ForCausalLM",
        {
            **FULL_AND_SLIDING,
            "head_dim": 256,
            "global_head_dim": 512,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,  # keys are values, in full-attention layers
            "hidden_size_per_layer_input": 0,
        },
        note="heads of two sizes",
    ),
    "gpt-neox": Family(
        "gpt_neox",
        "GPTNeoXForCausalLM",
        {"num_key_value_heads": None, "hidden_size": 384},
        note="a quarter of the channels is rotated",
    ),
    "gpt-oss": Family(
        "gpt_oss",
        "GptOssForCausalLM",
        {
            **SLIDING,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "head_dim": 64,
        },
        note="attention sinks",
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
    "falcon-rw": Family(
        "falcon",
        "FalconForCausalLM",
        {
            "num_key_value_heads": None,
            "multi_query": False,
            "alibi": True,
            "bias": True,
        },
        note="ALiBi",
    ),
    "bloom": Family(
        "bloom",
        "BloomForCausalLM",
        {"n_layer": 3, "n_head": 4, "num_key_value_heads": None},
        note="ALiBi",
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


REFUSED: dict[str, Family] = {
    "deepseek-v2": Family("deepseek_v2", "DeepseekV2ForCausalLM", refused="MLA"),
    "deepseek-v3": Family("deepseek_v3", "DeepseekV3ForCausalLM", refused="MLA"),
    "t5": Family(
        "t5", "T5ForConditionalGeneration", {"d_kv": 64}, refused="encoder-decoder"
    ),
    "whisper": Family(
        "whisper",
        "WhisperForConditionalGeneration",
        {"d_model": 256},
        refused="encoder-decoder",
    ),
    "bert": Family("bert", "BertModel", refused="BertModel is not served"),
    "mamba": Family("mamba", "MambaForCausalLM", refused="has no attention"),
    "mamba2": Family(
        "mamba2",
        "Mamba2ForCausalLM",
        {"head_dim": 64, "num_heads": 8},
        refused="has no attention",
    ),
    "jamba": Family("jamba", "JambaForCausalLM", refused="Mamba layers"),
    "falcon-h1": Family("falcon_h1", "FalconH1ForCausalLM", refused="Mamba layers"),
    "nemotron-h": Family("nemotron_h", "NemotronHForCausalLM", refused="Mamba layers"),
    "mpt": Family("mpt", "MptForCausalLM", refused="is not in vLLM 0.32"),
    "gemma3": Family(
        "gemma3",
        "Gemma3ForConditionalGeneration",
        {"text_config": _SHAPE | FULL_AND_SLIDING | {"head_dim": 256}},
        refused="the tokens of an image attend to later ones",
    ),
    "gemma3n": Family(
        "gemma3n", "Gemma3nForConditionalGeneration", refused="shares keys and values"
    ),
    "gemma4": Family(
        "gemma4",
        "Gemma4ForConditionalGeneration",
        {"text_config": _SHAPE | FULL_AND_SLIDING | {"head_dim": 256}},
        refused="the tokens of an image attend to later ones",
    ),
    "gemma4-e2b": Family(
        "gemma4_text",
        "Gemma4ForCausalLM",
        {**FULL_AND_SLIDING, "head_dim": 256, "num_kv_shared_layers": 1},
        refused="shares keys and values between layers",
    ),
    "llama4": Family(
        "llama4", "Llama4ForConditionalGeneration", refused="attends in chunks"
    ),
    "qwen2-vl": Family("qwen2_vl", "Qwen2VLForConditionalGeneration", refused="tested"),
    "gpt2": Family("gpt2", "GPT2LMHeadModel", refused="it was not tested"),
    "opt": Family("opt", "OPTForCausalLM", refused="it was not tested"),
    "cohere2": Family("cohere2", "Cohere2ForCausalLM", refused="it was not tested"),
    "bidirectional": Family(
        "gemma3_text",
        "Gemma3ForCausalLM",
        {"use_bidirectional_attention": True, "head_dim": 256},
        refused="both directions",
    ),
}


def save_family(directory: Path, family: Family) -> Path:
    """Write the model with random weights, norms and biases, and no tokenizer."""
    import torch
    import transformers

    torch.manual_seed(0)
    config = family.config()
    model = getattr(transformers, family.architecture)(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.2)
                if family.model_type == "gemma4_text" and "q_norm" in name:
                    # It has no softmax scale: trained norms are as small as this.
                    parameter.mul_(parameter.shape[0] ** -0.5)
            elif name.endswith("sinks"):
                parameter.normal_(0, 2)
            elif name.endswith("bias"):
                parameter.normal_(0, 0.2)
    model.save_pretrained(directory)
    return directory

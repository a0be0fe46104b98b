# SPDX-License-Identifier: Apache-2.0
"""Configs of small models, and engines' configurations made from them."""

import json
from pathlib import Path
from typing import Any

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 512,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 512,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "dtype": "bfloat16",
}
QWEN = LLAMA | {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "head_dim": 128,
}
GEMMA = LLAMA | {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "head_dim": 256,
    "sliding_window": 512,
    "layer_types": ["sliding_attention", "full_attention"],
    "query_pre_attn_scalar": 256,
    "hidden_activation": "gelu_pytorch_tanh",
}
GEMMA2 = GEMMA | {
    "architectures": ["Gemma2ForCausalLM"],
    "model_type": "gemma2",
    "attn_logit_softcapping": 50.0,
}
DEEPSEEK = LLAMA | {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "kv_lora_rank": 64,
    "q_lora_rank": None,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
}


def engine_config(
    folder: Path, model: dict[str, Any], kv_cache_dtype: str = "polykv", **options: Any
) -> Any:
    """Return vLLM's configuration of an engine; nothing is loaded."""
    from vllm.engine.arg_utils import EngineArgs

    (folder / "config.json").write_text(json.dumps(model))
    defaults = {"skip_tokenizer_init": True, "load_format": "dummy"}
    arguments = EngineArgs(
        model=str(folder), kv_cache_dtype=kv_cache_dtype, **defaults | options
    )
    return arguments.create_engine_config()

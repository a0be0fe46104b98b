# SPDX-License-Identifier: Apache-2.0
"""Which classes of models are served, by the name in `config.json`, and which are not.

A name is served when a model of its kind was run on the engine and compared with the
reference: `tests/families.py` has a case for each, docs/support.md is written from
those cases.
"""

ARCHITECTURES: dict[str, str] = {
    "FalconForCausalLM": "Falcon",
    "Gemma3ForCausalLM": "Gemma 3 (text)",
    "GemmaForCausalLM": "Gemma",
    "GPTNeoXForCausalLM": "GPT-NeoX and Pythia",
    "LlamaForCausalLM": "Llama",
    "MistralForCausalLM": "Mistral",
    "MixtralForCausalLM": "Mixtral",
    "Olmo2ForCausalLM": "OLMo 2",
    "Olmo3ForCausalLM": "OLMo 3",
    "OlmoForCausalLM": "OLMo",
    "Phi3ForCausalLM": "Phi-3 and Phi-4",
    "PhiForCausalLM": "Phi-1 and Phi-2",
    "Qwen2ForCausalLM": "Qwen2 and Qwen2.5",
    "Qwen2MoeForCausalLM": "Qwen2-MoE",
    "Qwen3ForCausalLM": "Qwen3",
    "Qwen3MoeForCausalLM": "Qwen3-MoE",
    "Qwen3NextForCausalLM": "Qwen3-Next",
}
"""The architectures that were tried, by the name in `config.json`."""

HYBRID: frozenset[str] = frozenset({"Qwen3NextForCausalLM"})
"""Those with linear-attention layers beside attention: vLLM keeps the states of those
layers in its own format, in pages of the size of the attention layers' pages."""

REFUSED: dict[str, str] = {}
"""Known and not served, with the reason, to follow "the architecture ... ". An
architecture in neither table was not tested and is refused for that."""

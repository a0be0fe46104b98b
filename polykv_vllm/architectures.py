# SPDX-License-Identifier: Apache-2.0
"""Which classes of models are served, by the name in `config.json`, and which are not.

A name is served when a model of its kind was run on the engine and compared with the
reference: `tests/families.py` has a case for each, docs/support.md is written from
those cases.
"""

ARCHITECTURES: dict[str, str] = {
    "BloomForCausalLM": "BLOOM",
    "FalconForCausalLM": "Falcon",
    "Gemma2ForCausalLM": "Gemma 2",
    "Gemma3ForCausalLM": "Gemma 3 (text)",
    "Gemma4ForCausalLM": "Gemma 4 (text)",
    "GemmaForCausalLM": "Gemma",
    "GPTNeoXForCausalLM": "GPT-NeoX and Pythia",
    "GptOssForCausalLM": "GPT-OSS",
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

_NO_ATTENTION = "is not served: it has no attention, it keeps states and no KV cache"
_MAMBA = "is not served: attention beside Mamba layers was not tested"
_CHUNKED = "is not served: it attends in chunks, which was not tested"
_IMAGES = (
    "is not served: the tokens of an image attend to later ones, and vLLM's module of "
    "it needs torchvision, which the CPU set-up leaves out; its text class, {}, is "
    "served"
)

REFUSED: dict[str, str] = {
    "BambaForCausalLM": _MAMBA,
    "FalconH1ForCausalLM": _MAMBA,
    "FalconMambaForCausalLM": _NO_ATTENTION,
    "Gemma3ForConditionalGeneration": _IMAGES.format("Gemma3ForCausalLM"),
    "Gemma4ForConditionalGeneration": _IMAGES.format("Gemma4ForCausalLM"),
    "GraniteMoeHybridForCausalLM": _MAMBA,
    "JambaForCausalLM": _MAMBA,
    "Llama4ForCausalLM": _CHUNKED,
    "Llama4ForConditionalGeneration": _CHUNKED,
    "Mamba2ForCausalLM": _NO_ATTENTION,
    "MambaForCausalLM": _NO_ATTENTION,
    "MPTForCausalLM": "is not in vLLM 0.32",
    "MptForCausalLM": "is not in vLLM 0.32",
    "NemotronHForCausalLM": _MAMBA,
    "Zamba2ForCausalLM": _MAMBA,
}
"""Known and not served, with the reason, to follow "the architecture ... ". An
architecture in neither table was not tested and is refused for that."""

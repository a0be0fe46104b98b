# SPDX-License-Identifier: Apache-2.0
"""Tiny models with random weights, and LoRA adapters for them, written by hand."""

import json
from pathlib import Path
from typing import Any

import torch

from tests.evaluate.byte_tokenizer import byte_tokenizer
from tests.random_models import SHAPE

VOCABULARY = SHAPE["vocab_size"]
EOS = 300  # no byte; the tokenizer adds it
RANK, ALPHA = 4, 8
ADAPTERS = ("north", "south")
LLAMA = {"num_key_value_heads": 2, "head_dim": 64, "eos_token_id": EOS}


def save_llama(directory: Path, **changes: Any) -> Any:
    """Write a Llama and a tokenizer with a token for each byte; returns the model."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model("llama", **SHAPE | LLAMA | changes)
    model = AutoModelForCausalLM.from_config(config)
    save(model, directory)
    return model


def save_gemma(directory: Path) -> Path:
    """Write a Gemma 3 with two windows of 64 tokens and one layer that sees all."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    changes = {"head_dim": 64, "sliding_window": 64, "layer_types": kinds}
    config = AutoConfig.for_model("gemma3_text", **SHAPE | changes)
    save(AutoModelForCausalLM.from_config(config), directory)
    return directory


def save(model: Any, directory: Path) -> None:
    """Write a model and its tokenizer."""
    tokenizer = byte_tokenizer()
    padding = [f"<{n}>" for n in range(len(tokenizer), EOS)]
    tokenizer.add_tokens([*padding, "</s>"], special_tokens=True)
    tokenizer.eos_token = "</s>"
    assert tokenizer.eos_token_id == EOS
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def save_adapters(directory: Path, model: Any) -> None:
    """Write each adapter, as peft does, and the model that has it merged in.

    `directory/NAME` is an adapter on all the projections of `model`,
    `directory/merged-NAME` the model with W + alpha / rank * B A in their place.
    """
    from safetensors.torch import save_file

    original = {name: p.detach().clone() for name, p in model.named_parameters()}
    for seed, adapter in enumerate(ADAPTERS, start=1):
        torch.manual_seed(seed)
        path = directory / adapter
        path.mkdir()
        tensors = {}
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if not name.endswith("_proj.weight"):
                    continue
                a = torch.randn(RANK, weight.shape[1]) * weight.shape[1] ** -0.5
                b = torch.randn(weight.shape[0], RANK) * 0.3
                prefix = "base_model.model." + name.removesuffix("weight")
                tensors[prefix + "lora_A.weight"] = a
                tensors[prefix + "lora_B.weight"] = b
                weight.copy_(original[name] + ALPHA / RANK * b @ a)
        save(model, directory / f"merged-{adapter}")
        save_file(tensors, path / "adapter_model.safetensors")
        config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "bias": "none"}
        modules = sorted({name.split(".")[-3] for name in tensors})
        config |= {"r": RANK, "lora_alpha": ALPHA, "target_modules": modules}
        (path / "adapter_config.json").write_text(json.dumps(config))
        with torch.no_grad():
            for name, weight in model.named_parameters():
                weight.copy_(original[name])

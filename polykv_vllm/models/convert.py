# SPDX-License-Identifier: Apache-2.0
"""Turns a GGUF file into a Hugging Face directory of bf16 safetensors.

Runs as a program of its own (`python -m polykv_vllm.models.convert`), so that the
caller keeps neither torch nor the weights in memory.
"""

import argparse
import json
from pathlib import Path
from typing import Any

BOS_TOKEN = "<bos>"


def convert(gguf: Path, out_dir: Path, fixes: list[str]) -> None:
    """Write model, tokenizer and chat template of `gguf` into `out_dir`.

    Args:
        gguf: The GGUF file; its quantized weights are unpacked to bf16.
        out_dir: An existing empty directory.
        fixes: Names from `catalog.Fix`, applied in this order.

    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    source = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
    model = AutoModelForCausalLM.from_pretrained(
        **source,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
    )
    tokenizer = AutoTokenizer.from_pretrained(**source)
    if "tie_embeddings" in fixes:
        tie_embeddings(model)
    # The weights are plain now; a loader that saw this entry would look for GGUF.
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(out_dir)
    tokenizer.save_pretrained(out_dir)
    if "bos" in fixes:
        prepend_bos(out_dir)


def tie_embeddings(model: Any) -> None:
    """Make the input embedding the output head's tensor, as the original has it.

    The GGUF file stores the two apart and quantizes them differently; the output
    head is the better copy.
    """
    model.get_input_embeddings().weight.data.copy_(
        model.get_output_embeddings().weight.data
    )
    model.config.tie_word_embeddings = True
    model.tie_weights()


def prepend_bos(model_dir: Path) -> None:
    """Make the saved tokenizer start every text with `<bos>`.

    The conversion drops the rule, and Gemma degenerates without that token.
    """
    tokenizer_json = model_dir / "tokenizer.json"
    tokenizer = json.loads(tokenizer_json.read_text())
    bos_id = next(
        t["id"] for t in tokenizer["added_tokens"] if t["content"] == BOS_TOKEN
    )
    first, second = (
        [
            {"SpecialToken": {"id": BOS_TOKEN, "type_id": type_id}},
            {"Sequence": {"id": sequence, "type_id": type_id}},
        ]
        for sequence, type_id in (("A", 0), ("B", 1))
    )
    tokenizer["post_processor"] = {
        "type": "TemplateProcessing",
        "single": first,
        "pair": first + second,
        "special_tokens": {
            BOS_TOKEN: {"id": BOS_TOKEN, "ids": [bos_id], "tokens": [BOS_TOKEN]}
        },
    }
    tokenizer_json.write_text(json.dumps(tokenizer, ensure_ascii=False))
    config_json = model_dir / "tokenizer_config.json"
    config = json.loads(config_json.read_text())
    config |= {"add_bos_token": True, "bos_token": BOS_TOKEN}
    config_json.write_text(json.dumps(config, ensure_ascii=False, indent=2))


def main() -> None:
    """Parse the command line and convert."""
    parser = argparse.ArgumentParser(description=convert.__doc__)
    parser.add_argument("gguf", type=Path)
    parser.add_argument("out_dir", type=Path)
    parser.add_argument("--fix", action="append", default=[], dest="fixes")
    options = parser.parse_args()
    convert(options.gguf, options.out_dir, options.fixes)


if __name__ == "__main__":
    main()

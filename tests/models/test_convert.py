# SPDX-License-Identifier: Apache-2.0
"""The repairs of what a conversion from GGUF loses, and the real default model."""

import json
from pathlib import Path

import pytest

from polykv_vllm.models import DEFAULT_MODEL, build_model
from polykv_vllm.models.convert import prepend_bos, tie_embeddings


def test_prepend_bos(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"<bos>": 0, "hello": 1, "world": 2, "<unk>": 3}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["<bos>"])
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(tmp_path)
    prepend_bos(tmp_path)
    fixed = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    assert fixed.encode("hello world") == [0, 1, 2]
    assert fixed.encode("hello world", add_special_tokens=False) == [1, 2]
    assert fixed.encode("hello", "world") == [0, 1, 0, 2]


def test_tie_embeddings(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=16,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config)
    head = model.lm_head.weight.detach().clone()
    assert not model.model.embed_tokens.weight.equal(head)
    tie_embeddings(model)
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["tie_word_embeddings"]
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert again.lm_head.weight.equal(head.to(again.dtype))
    assert again.model.embed_tokens.weight.equal(again.lm_head.weight)


@pytest.mark.e2e
def test_default_model_knows_the_capital_of_france() -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = build_model(DEFAULT_MODEL)
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(
        question, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    answer = model.generate(**prompt, max_new_tokens=12, do_sample=False)
    assert "Paris" in tokenizer.decode(answer[0])

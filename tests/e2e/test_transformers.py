# SPDX-License-Identifier: Apache-2.0
"""The transformers implementation on a real model, and the examples of its document."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parent.parent.parent
DOCUMENT = ROOT / "docs" / "transformers.md"


def test_the_examples_of_the_document_run(
    smollm2: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    examples = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    assert len(examples) == 3
    names: dict[str, Any] = {}
    for example in examples:
        exec(compile(example, str(DOCUMENT), "exec"), names)
    assert len(names["answers"]) == 3 and all(names["answers"])
    summary = names["pool"].memory_summary()
    assert 2.6 < summary.ratio < 2.8  # 2.783 less a block's unused rows
    assert summary.readers == 1 and summary.private_bytes[0] > 0
    assert "the paper's baseline" in capsys.readouterr().out


@pytest.fixture(scope="module")
def model(smollm2: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.bfloat16).eval()


@pytest.fixture(scope="module")
def tokens(smollm2: Path) -> torch.Tensor:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    text = (ROOT / "LICENSE").read_text()
    return tokenizer(text, return_tensors="pt").input_ids[:, :900]


@pytest.mark.parametrize(
    ("fmt", "bound"), [("polykv_k8v8", 0.005), ("polykv_k7v4", 0.03), ("polykv", 0.08)]
)
def test_predictions_stay_near_the_uncompressed_ones(
    model: Any, tokens: torch.Tensor, fmt: str, bound: float
) -> None:
    from polykv_vllm.hf import PolyKVCache

    with torch.inference_mode():
        model.set_attn_implementation("sdpa")
        exact = model(tokens).logits[0].float().log_softmax(-1)
        model.set_attn_implementation("polykv")
        cache = PolyKVCache.for_model(model, fmt)
        ours = model(tokens, past_key_values=cache).logits[0].float().log_softmax(-1)
    divergence = float((exact.exp() * (exact - ours)).sum(-1).mean())
    assert 0 < divergence < bound

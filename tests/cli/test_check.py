# SPDX-License-Identifier: Apache-2.0
"""`polykv check`: the arithmetic, and refusals that say why."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from polykv_vllm.cli import app
from polykv_vllm.models import DEFAULT_MODEL

LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "hidden_size": 576,
}
GEMMA = {
    "model_type": "gemma3_text",
    "architectures": ["Gemma3ForCausalLM"],
    "num_hidden_layers": 18,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "hidden_size": 640,
    "head_dim": 256,
    "sliding_window": 512,
}


@pytest.fixture
def check(tmp_path: Path) -> Any:
    def run(config: dict[str, Any], *options: str) -> Any:
        (tmp_path / "config.json").write_text(json.dumps(config))
        return CliRunner(env={"COLUMNS": "200"}).invoke(
            app, ["check", str(tmp_path), *options]
        )

    return run


def test_supported_model(check: Any) -> None:
    result = check(LLAMA, "--memory-gib", "4")
    assert result.exit_code == 0, result.output
    # 30 layers x 3 heads x 92 bytes, against 2 x 64 x 2 bytes; 128-token blocks.
    for figure in ("8,280", "23,040", "2.78x", "186,368", "518,656"):
        assert figure in result.output


def test_other_format(check: Any) -> None:
    result = check(LLAMA, "--kv-cache-dtype", "polykv_k8v8")
    assert result.exit_code == 0
    assert f"{30 * 3 * 132:,}" in result.output


QWEN = {  # Qwen2.5-Coder-1.5B
    "model_type": "qwen2",
    "architectures": ["Qwen2ForCausalLM"],
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "hidden_size": 1536,
}


def test_windows_are_counted(check: Any) -> None:
    result = check(QWEN, "--kv-cache-dtype", "polykv_k2v2", "--windows", "64/256")
    assert result.exit_code == 0, result.output
    # 11 pages of 32 tokens in bf16, spread over 8,192 tokens of 68 bytes each.
    token_bytes = 28 * 2 * 68 + 11 * 32 * 28 * 2 * 512 / 8192
    assert f"{round(token_bytes):,}" in result.output
    ratio = 28 * 2 * 512 / token_bytes
    assert ratio >= 5.3 and f"{ratio:.2f}x" in result.output
    assert "9.62 MiB for each running sequence" in result.output
    assert "at most 26 run at once in 1 GiB" in result.output


def test_windows_that_are_none(check: Any) -> None:
    result = check(QWEN, "--windows", "64")
    assert result.exit_code == 1
    assert "64/256" in result.output


def test_linear_attention_layers_are_mentioned(check: Any) -> None:
    hybrid = {
        **LLAMA,
        "model_type": "qwen3_next",
        "architectures": ["Qwen3NextForCausalLM"],
        "head_dim": 64,
        "layer_types": [*["linear_attention"] * 29, "full_attention"],
    }
    result = check(hybrid)
    assert result.exit_code == 0, result.output
    assert "1 layer, 3 KV heads x 64" in result.output
    assert "29 linear-attention layers keep states" in result.output


def test_sliding_window_layers_are_mentioned(check: Any) -> None:
    result = check(GEMMA)
    assert result.exit_code == 0, result.output
    assert "15 layers keep only the newest 512 tokens" in result.output


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"head_dim": 72}, "head size 72"),
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel"),
        ({"is_encoder_decoder": True}, "encoder-decoder"),
    ],
)
def test_refusal_exits_with_1_and_the_reason(
    check: Any, change: dict[str, Any], reason: str
) -> None:
    result = check(LLAMA | change)
    assert result.exit_code == 1
    assert reason in result.output


def test_unknown_dtype_names_those_there_are(check: Any) -> None:
    result = check(LLAMA, "--kv-cache-dtype", "fp8")
    assert result.exit_code == 1
    assert "'fp8'" in result.output
    assert "polykv_k7v4" in result.output


def test_unreadable_config(check: Any, tmp_path: Path) -> None:
    result = check({"model_type": "no-such-type"})
    assert result.exit_code == 1
    assert "no-such-type" in result.output


def test_catalogue_model_that_is_not_built(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("POLYKV_CACHE", str(tmp_path))
    result = CliRunner().invoke(app, ["check", DEFAULT_MODEL])
    assert result.exit_code == 1
    assert f"polykv model {DEFAULT_MODEL}" in result.output

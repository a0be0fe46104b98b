# SPDX-License-Identifier: Apache-2.0
"""Reasons not to serve on a GPU, as vLLM's platform object tells of one."""

from types import SimpleNamespace
from typing import Any

import pytest

from polykv_vllm.config import PolyKVConfig


def pretend(
    monkeypatch: pytest.MonkeyPatch, name: str, capability: int | None = None
) -> None:
    """Make vLLM's current platform another one."""
    import vllm.platforms

    found = None if capability is None else SimpleNamespace(to_int=lambda: capability)
    platform = SimpleNamespace(
        is_cpu=lambda: name == "cpu",
        is_cuda=lambda: name == "cuda",
        device_name=name,
        get_device_capability=lambda: found,
    )
    monkeypatch.setattr(vllm.platforms, "_current_platform", platform)


def reasons(**options: Any) -> str:
    from polykv_vllm.attention.device import platform_reasons

    return "; ".join(platform_reasons(PolyKVConfig(**options)))


@pytest.mark.parametrize("capability", [80, 86, 90, 100])
def test_gpus_that_are_served(monkeypatch: pytest.MonkeyPatch, capability: int) -> None:
    pretend(monkeypatch, "cuda", capability)
    assert reasons() == ""


@pytest.mark.parametrize("capability", [70, 75])
def test_gpus_that_are_not(monkeypatch: pytest.MonkeyPatch, capability: int) -> None:
    pretend(monkeypatch, "cuda", capability)
    assert "need 8.0 (Ampere) or later" in reasons()


@pytest.mark.parametrize("name", ["rocm", "xpu", ""])
def test_other_platforms(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    pretend(monkeypatch, name)
    said = reasons()
    assert f"the platform is {name or 'not known to vLLM'}" in said
    assert "cpu (vLLM's CPU build), and cuda (NVIDIA" in said


def test_options_of_the_cpu_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, "cuda", 90)
    assert "isa='avx2' is of the CPU kernels" in reasons(isa="avx2")
    assert "fast_arithmetic is of the CPU" in reasons(fast_arithmetic=True)


@pytest.mark.parametrize(
    ("changes", "dtype", "reason"),
    [
        ({}, "polykv", ""),
        ({"head_dim": 96}, "polykv", "head size 96 has no GPU kernels; possible: 64"),
        ({}, "polykv_k3v2", "polykv_k3v2 has no GPU kernels; possible: polykv_k8v3"),
        ({"attn_logit_softcapping": 50.0}, "polykv", "it has a logits soft cap"),
        ({"alibi": True}, "polykv", "it has ALiBi slopes"),
    ],
)
def test_models(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], dtype: str, reason: str
) -> None:
    from polykv_vllm.attention.device import model_reasons

    shape = {
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 64,
    }
    config = SimpleNamespace(**shape | changes)
    assert model_reasons(config, dtype) == []  # on a CPU
    pretend(monkeypatch, "cuda", 90)
    found = model_reasons(config, dtype)
    assert (reason in "; ".join(found)) if reason else found == []


def test_a_layer_elsewhere_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines are asked before; this is for code that makes layers itself."""
    import torch
    from vllm.v1.attention.selector import AttentionSelectorConfig

    from polykv_vllm.attention.backend import select_backend
    from polykv_vllm.errors import UnsupportedError

    config = AttentionSelectorConfig(
        head_size=64, dtype=torch.bfloat16, kv_cache_dtype="polykv", block_size=32
    )
    pretend(monkeypatch, "rocm")
    with pytest.raises(UnsupportedError, match="the platform is rocm; possible"):
        select_backend(None, config)

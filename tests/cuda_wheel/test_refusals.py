# SPDX-License-Identifier: Apache-2.0
"""What cannot be served is refused before an engine starts, with what is possible."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.cuda_wheel.models import DEEPSEEK, GEMMA2, LLAMA, engine_config


def refusal(folder: Path, *arguments: Any, **options: Any) -> str:
    from polykv_vllm.errors import PolyKVError

    with pytest.raises(PolyKVError) as caught:
        engine_config(folder, *arguments, **options)
    return str(caught.value)


@pytest.mark.parametrize("capability", [(7, 0), (7, 5)])
def test_old_gpus(tmp_path: Path, gpu: Any, capability: tuple[int, int]) -> None:
    """Triton makes no matrix instructions for Turing (docs/gpu.md)."""
    gpu.capability = capability
    said = refusal(tmp_path, LLAMA, dtype="float16")
    assert f"compute capability {capability[0]}.{capability[1]} is not" in said
    assert "8.0 (Ampere) or later" in said


@pytest.mark.parametrize(
    ("model", "dtype", "reason"),
    [
        (DEEPSEEK, "polykv", "multi-head latent attention"),
        (LLAMA | {"head_dim": 512}, "polykv", "head size 512 has no GPU kernels"),
        (LLAMA, "polykv_k2v2", "polykv_k2v2 has no GPU kernels; possible: polykv_k8v3"),
        (
            LLAMA | {"hidden_size": 640, "num_attention_heads": 80},
            "polykv",
            "40 query heads per KV head; the GPU kernels take up to 32",
        ),
        (GEMMA2, "polykv", "it has a logits soft cap, which the GPU kernels"),
    ],
    ids=["MLA", "head size", "format", "heads", "soft cap"],
)
def test_models_and_formats(
    tmp_path: Path, model: dict[str, Any], dtype: str, reason: str
) -> None:
    assert reason in refusal(tmp_path, model, dtype)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"isa": "avx2"}, "the option isa='avx2' is of the CPU kernels"),
        ({"fast_arithmetic": True}, "fast_arithmetic is of the CPU kernels"),
        ({"pool": {"path": "/tmp/none"}}, "pool.path is of the CPU kernels"),
    ],
    ids=["isa", "fast", "pool"],
)
def test_options_of_the_cpu(
    tmp_path: Path, options: dict[str, Any], reason: str
) -> None:
    said = refusal(tmp_path, LLAMA, additional_config={"polykv": options})
    assert reason in said


def test_another_backend(tmp_path: Path) -> None:
    said = refusal(tmp_path, LLAMA, attention_backend="FLASH_ATTN")
    assert "--attention-backend FLASH_ATTN cannot read this cache" in said


@pytest.mark.parametrize("name", ["rocm", "xpu"])
def test_other_platforms(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    import vllm.platforms

    from polykv_vllm.attention.validate import check_vllm_config
    from polykv_vllm.errors import UnsupportedError

    config = engine_config(tmp_path, LLAMA)
    other = SimpleNamespace(
        is_cpu=lambda: False, is_cuda=lambda: False, device_name=name
    )
    monkeypatch.setattr(vllm.platforms, "_current_platform", other)
    with pytest.raises(
        UnsupportedError, match=f"the platform is {name}; possible: cpu"
    ):
        check_vllm_config(config)


def test_triton_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import triton

    monkeypatch.setattr(triton, "__version__", "3.1.0")
    assert "need Triton 3.4 or later; this is 3.1.0" in refusal(tmp_path, LLAMA)

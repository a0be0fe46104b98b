# SPDX-License-Identifier: Apache-2.0
"""A calibration that cannot be served is refused before any weight is read."""

from pathlib import Path
from typing import Any

import pytest

from polykv_vllm.attention.calibration import calibration_folder
from polykv_vllm.errors import UnsupportedError
from tests.calibrate.models import calibrate_random
from tests.random_models import save_random_model


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for family in ("llama", "qwen2"):
        model = save_random_model(folder / family, family)
    calibrate_random(model, folder / "qwen2" / "polykv")
    return folder


def create(model: Path, calibration: str, **options: Any) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    more = {"additional_config": {"polykv": {"calibration": calibration}}}
    more |= {"kv_cache_dtype": "polykv", "skip_tokenizer_init": True} | options
    return EngineArgs(model=str(model), **more).create_engine_config()


def refusal(model: Path, calibration: str, **options: Any) -> str:
    with pytest.raises(UnsupportedError) as caught:
        create(model, calibration, **options)
    return str(caught.value)


@pytest.mark.usefixtures("installed")
def test_a_calibration_is_looked_at_first(models: Path) -> None:
    own, folder = models / "qwen2", str(models / "qwen2" / "polykv")
    for calibration in ("auto", "none", folder):
        create(own, calibration)
    words = refusal(models / "llama", folder)
    assert folder in words and "model_type: llama, not qwen2" in words
    assert "calibration.json" in refusal(own, str(models / "nowhere"))
    assert "--enable-lora" in refusal(own, "auto", enable_lora=True)
    create(own, "none", enable_lora=True)
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 5e6}}
    assert "rope: " in refusal(own, folder, hf_overrides=rope)


def test_where_a_calibration_is_looked_for(models: Path) -> None:
    class Config:
        model = str(models / "qwen2")
        runner = "auto"

    class Draft(Config):
        runner = "draft"

    class Other(Config):
        model = str(models / "llama")

    own, given = models / "qwen2" / "polykv", Path("/given")
    assert calibration_folder("auto", Config) == own
    assert calibration_folder("auto", Other) is None
    assert calibration_folder("none", Config) is None
    assert calibration_folder("/given", Config) == given
    # The option is about the served model: a draft has only its own.
    assert calibration_folder("/given", Draft) == own

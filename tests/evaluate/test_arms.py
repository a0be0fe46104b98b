# SPDX-License-Identifier: Apache-2.0
"""Names of arms, and what errors list."""

from pathlib import Path

import pytest

from polykv_vllm.evaluate.arms import parse_arm, parse_arms
from polykv_vllm.evaluate.errors import EvalError
from polykv_vllm.formats import CACHE_DTYPES
from polykv_vllm.windows.sizes import WindowSizes


def test_the_reference_is_there_once_and_first() -> None:
    arms = parse_arms("polykv_k7v4, fp32,bf16,polykv_k7v4")
    assert [arm.name for arm in arms] == ["bf16", "polykv_k7v4", "fp32"]
    assert arms[0].is_reference and not arms[1].is_reference


def test_an_arm_is_a_cache_a_dtype_and_a_treatment() -> None:
    plain, treated = parse_arm("polykv_k7v4"), parse_arm("polykv_k7v4+hadamard")
    assert plain.kv_cache_dtype == treated.kv_cache_dtype == "polykv_k7v4"
    assert parse_arm("fp32").additional_config == {}
    # Without, also where the model's own folder has a calibration.
    without = {"calibration": "none"}
    assert plain.additional_config == {"polykv": without}
    assert treated.additional_config == {
        "polykv": without | {"key_treatment": "hadamard"}
    }
    assert plain.is_ours and not parse_arm("fp32").is_ours
    assert (parse_arm("fp32").dtype, parse_arm("fp32").kv_cache_dtype) == (
        "float32",
        "auto",
    )


def test_an_arm_may_be_calibrated(tmp_path: Path) -> None:
    for name in ("polykv_k7v4+calibrated", "polykv+hadamard+calibrated"):
        arm = parse_arm(name, tmp_path)
        assert arm.name == name
        assert arm.additional_config["polykv"]["calibration"] == str(tmp_path)
    assert arm.additional_config["polykv"]["key_treatment"] == "hadamard"
    with pytest.raises(EvalError, match="--calibration"):
        parse_arm("polykv+calibrated")


def test_an_arm_with_windows_has_their_sizes_in_its_name() -> None:
    sizes = WindowSizes(16, 128)
    given = parse_arm("polykv_k2v2+windows", windows=sizes)
    named = parse_arm("polykv_k2v2+windows16-128")
    assert given == named and given.name == "polykv_k2v2+windows16-128"
    options = {"sink_tokens": 16, "recent_tokens": 128}
    assert given.additional_config["polykv"]["windows"] == options
    default = parse_arm("polykv_k2v2+hadamard+windows")
    assert default.name == "polykv_k2v2+hadamard+windows64-256"
    assert default.key_treatment == "hadamard"
    assert default.windows == WindowSizes(64, 256)
    arms = parse_arms("polykv_k2v2+windows,polykv_k2v2+windows64-256")
    assert [arm.name for arm in arms] == ["bf16", "polykv_k2v2+windows64-256"]
    assert "windows" not in parse_arm("polykv_k2v2").additional_config["polykv"]


@pytest.mark.parametrize("name", CACHE_DTYPES)
def test_every_format_is_an_arm(name: str) -> None:
    assert parse_arm(name).kv_cache_dtype == name


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("polykv_k9v9", ["polykv_k9v9", "bf16", "fp32", "polykv_k7v4"]),
        ("polykv+rotate", ["rotate", "hadamard", "channel_scale"]),
        ("polykv+", ["no key treatment ''", "hadamard"]),
        ("polykv+windows64", ["windows64", "windows64-256"]),
        ("bf16+windows", ["no windows", "polykv_k2v2"]),
        ("bf16+hadamard", ["bf16+hadamard", "no key treatment", "polykv"]),
    ],
)
def test_errors_name_what_exists(name: str, words: list[str]) -> None:
    with pytest.raises(EvalError) as caught:
        parse_arm(name)
    for word in words:
        assert word in str(caught.value)

# SPDX-License-Identifier: Apache-2.0
"""The servers that are compared."""

import json
from pathlib import Path

import pytest

from polykv_vllm.bench.arms import ARMS, arm_named, cpu_has_amx
from polykv_vllm.formats import CACHE_DTYPES


@pytest.mark.parametrize("dtype", CACHE_DTYPES)
def test_every_format_is_an_arm_with_and_without_sharing(dtype: str) -> None:
    shared, unshared = arm_named(dtype), arm_named(f"{dtype}-unshared")
    assert shared.cache_dtype == unshared.cache_dtype == dtype
    assert shared.is_ours and unshared.is_ours


def test_bound_is_no_arm_of_ours() -> None:
    assert [arm.name for arm in ARMS.values() if arm.is_bound] == ["bound"]
    assert not arm_named("bound").is_ours


def test_unknown_arm_lists_all() -> None:
    with pytest.raises(ValueError, match=r"'stok'.*stock-fp8.*polykv_k7v4-unshared"):
        arm_named("stok")


def test_windows_are_an_option_of_a_format() -> None:
    arm = arm_named("polykv_k2v2+windows16-128")
    assert arm.name == "polykv_k2v2+windows16-128"
    assert arm.is_ours and arm.cache_dtype == "polykv_k2v2"
    (flag, config) = arm.serve_args
    assert flag == "--additional-config"
    windows = {"sink_tokens": 16, "recent_tokens": 128}
    assert json.loads(config) == {"polykv": {"windows": windows}}
    recommended = json.loads(arm_named("polykv+windows").serve_args[1])
    windows = {"sink_tokens": 64, "recent_tokens": 256}
    assert recommended == {"polykv": {"windows": windows}}


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("stock+windows", "possible with polykv, .*polykv_k2v2"),
        ("polykv-unshared+windows", "possible with polykv"),
        ("polykv+windows7", "no 'windows7': possible is windows, or .* windows64-256"),
        ("polykv+16-128", "no '16-128'"),
        ("polykv+hadamard", "no 'hadamard'"),
        ("polykv+", "no ''"),
    ],
)
def test_wrong_suffixes_say_what_is_possible(name: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        arm_named(name)


def test_amx_is_found_in_the_cpus_flags(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    assert not cpu_has_amx(str(cpuinfo))
    cpuinfo.write_text("flags : avx512f amx_bf16 amx_tile\n")
    assert cpu_has_amx(str(cpuinfo))

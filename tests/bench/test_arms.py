# SPDX-License-Identifier: Apache-2.0
"""The servers that are compared."""

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


def test_amx_is_found_in_the_cpus_flags(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    assert not cpu_has_amx(str(cpuinfo))
    cpuinfo.write_text("flags : avx512f amx_bf16 amx_tile\n")
    assert cpu_has_amx(str(cpuinfo))

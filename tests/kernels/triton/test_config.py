# SPDX-License-Identifier: Apache-2.0
"""What is not supported is refused by name."""

import subprocess
import sys

import pytest

from polykv_vllm import ops
from polykv_vllm.formats import FORMATS
from polykv_vllm.kernels.triton import config
from polykv_vllm.kernels.triton.tile import HEAD_DIMS
from polykv_vllm.ops import gpu


@pytest.mark.parametrize("capability", [60, 70, 75])
def test_old_architectures(capability: int) -> None:
    with pytest.raises(NotImplementedError, match=r"need 8\.0 \(Ampere\) or later"):
        config.device_config(capability)


@pytest.mark.parametrize("capability", [80, 86, 89, 90, 100])
def test_architectures_that_are_served(capability: int) -> None:
    assert config.device_config(capability).int8


@pytest.mark.parametrize("group", range(1, 33))
def test_items_hold_a_token(group: int) -> None:
    assert group <= config.small_rows(group) <= config.LARGE_ROWS


def test_every_shape_has_a_launch() -> None:
    device = config.device_config(80)
    for fmt in (each for each in FORMATS.values() if not each.is_low_bit):
        for head_dim in HEAD_DIMS:
            for rows in (8, 16, 32):
                assert config.attend_config(device, fmt, head_dim, rows).num_warps


def test_the_ops_know_the_kernels_without_triton() -> None:
    """Other devices are refused with a list of what there is."""
    fmt = FORMATS["polykv_k8v3"]
    with pytest.raises(NotImplementedError, match="cuda/triton"):
        ops.layer_attention(fmt, 1.0, device="xpu")


def test_a_missing_or_old_triton_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(NotImplementedError, match="not installed"):
        gpu.require_triton()

    class Old:
        __version__ = "3.1.0"

    monkeypatch.setitem(sys.modules, "triton", Old())
    with pytest.raises(NotImplementedError, match=r"this is 3\.1\.0"):
        gpu.require_triton()


def test_importing_the_ops_imports_no_triton() -> None:
    code = "import sys, polykv_vllm.ops; sys.exit('triton' in sys.modules)"
    # torch itself may import it; only what the ops add counts.
    torch = "import sys, torch; sys.exit('triton' in sys.modules)"
    by_torch = subprocess.run([sys.executable, "-c", torch]).returncode
    assert subprocess.run([sys.executable, "-c", code]).returncode == by_torch

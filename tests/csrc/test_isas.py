# SPDX-License-Identifier: Apache-2.0
"""Which instruction sets the tests beside this one cover on this machine.

They run over all that the CPU has. What it lacks is skipped here, by name, so that a
report of the tests says what ran: NEON's kernels have test_arm.py.
"""

import platform

import pytest
import torch

from polykv_vllm import ops
from tests.kernel_cases import CPP_ISAS, FORMAT_LIST, make_batch

EXPECTED = {
    "x86_64": ("amx", "avx512", "avx512bw", "avxvnni", "avx2", "scalar"),
    "aarch64": ("neon_i8mm", "neon", "scalar"),
}


def test_the_build_has_every_set_of_its_architecture() -> None:
    expected = EXPECTED.get(platform.machine(), ("scalar",))
    assert ops.compiled_isas() == expected


@pytest.mark.parametrize("isa", ops.compiled_isas())
def test_same_bits_as_the_scalar_kernels(isa: str) -> None:
    if isa not in ops.available_isas():
        pytest.skip(f"this CPU has no {isa}: its kernels did not run here")
    assert isa in CPP_ISAS
    for fmt in FORMAT_LIST:
        batch = make_batch(fmt, [(1, 700), (45, 45)], group=3, isa="scalar")
        assert torch.equal(batch.run(isa), batch.run("scalar"))

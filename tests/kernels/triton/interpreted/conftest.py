# SPDX-License-Identifier: Apache-2.0
"""Kernels run by Triton's interpreter on CPU tensors."""

import pytest

from polykv_vllm.kernels.triton.interpret import speed_up_interpreter
from tests.gpu_cases import INTERPRETED

if INTERPRETED:
    speed_up_interpreter()


@pytest.fixture(autouse=True)
def _one_thread(one_torch_thread: None) -> None:
    """Apply to every test of this directory."""

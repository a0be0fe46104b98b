# SPDX-License-Identifier: Apache-2.0
"""Small tensors: one torch thread (the kernels are told theirs)."""

import pytest


@pytest.fixture(autouse=True)
def _one_thread(one_torch_thread: None) -> None:
    """Apply to every test of this directory."""

# SPDX-License-Identifier: Apache-2.0
"""Small models: one torch thread, no gradients."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _one_thread(one_torch_thread: None) -> None:
    """Apply to every test of this directory."""


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield

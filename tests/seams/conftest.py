# SPDX-License-Identifier: Apache-2.0
"""vLLM with the seams installed, or removed, around each test."""

from collections.abc import Iterator

import pytest

pytest.importorskip("vllm", reason="the seams are about vLLM")

from polykv_vllm.seams import registry


@pytest.fixture
def removed() -> Iterator[None]:
    """vLLM as it is without us; the seams come back afterwards."""
    registry.uninstall()
    yield
    registry.uninstall()
    registry.install()


@pytest.fixture
def installed() -> Iterator[None]:
    """vLLM with the seams; they stay, other tests want them too."""
    registry.install()
    registry.require()
    yield
    registry.install()

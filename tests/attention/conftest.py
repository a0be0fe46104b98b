# SPDX-License-Identifier: Apache-2.0
"""vLLM with the seams installed."""

import pytest

pytest.importorskip("vllm", reason="attention/ is vLLM-facing")


@pytest.fixture(autouse=True)
def _seams() -> None:
    from polykv_vllm.seams import registry

    registry.install()
    registry.require()

# SPDX-License-Identifier: Apache-2.0
"""The real engine on real models. Everything in this directory is marked `e2e`."""

from pathlib import Path

import pytest

HERE = Path(__file__).parent
TEXT = (HERE.parent.parent / "LICENSE").read_text()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.e2e)


@pytest.fixture(scope="session")
def smollm2() -> Path:
    from polykv_vllm.models import build_model

    return build_model("smollm2-135m-instruct")


@pytest.fixture(scope="session")
def gemma3() -> Path:
    from polykv_vllm.models import build_model

    return build_model("gemma3-270m")

# SPDX-License-Identifier: Apache-2.0
"""vLLM's CUDA build on a machine without a GPU: one that has none is pretended.

`make test-cuda-wheel` runs these tests in an environment of their own. Elsewhere they
are skipped, and nothing is pretended.
"""

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


def is_cuda_build() -> bool:
    """Whether vLLM here is the CUDA build, beside a torch for CUDA."""
    if importlib.util.find_spec("vllm") is None:
        return False
    import torch
    from vllm.version import __version__

    return "cpu" not in __version__ and torch.version.cuda is not None


IS_CUDA_BUILD = is_cuda_build()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what is here unless vLLM is the CUDA build."""
    here = Path(__file__).parent
    skip = pytest.mark.skip(reason="needs vLLM's CUDA build: make test-cuda-wheel")
    for item in items:
        if here in item.path.parents and not IS_CUDA_BUILD:
            item.add_marker(skip)


class Gpu:
    """What the pretended GPU says of itself."""

    capability = (9, 0)


def pretend_gpu() -> None:
    """Make vLLM's CUDA platform the current one.

    vLLM decides by asking the driver, which is a stub that knows none.
    """
    # vLLM then keeps Triton although no driver is active.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    import vllm.platforms
    from vllm.platforms.cuda import CudaPlatformBase
    from vllm.platforms.interface import DeviceCapability

    class Pretended(CudaPlatformBase):
        @classmethod
        def get_device_capability(cls, device_id: int = 0) -> DeviceCapability:
            return DeviceCapability(*Gpu.capability)

        @classmethod
        def get_device_name(cls, device_id: int = 0) -> str:
            return "a GPU that is pretended"

        @classmethod
        def get_device_total_memory(cls, device_id: int = 0) -> int:
            return 80 << 30

        @classmethod
        def device_count(cls) -> int:
            return 1

        @classmethod
        def is_pin_memory_available(cls) -> bool:
            return False

    vllm.platforms._current_platform = Pretended()


@pytest.fixture(scope="session", autouse=True)
def _plugin() -> Iterator[None]:
    """The platform, and the plugin as vLLM loads it."""
    if IS_CUDA_BUILD:
        pretend_gpu()
        from vllm.plugins import load_general_plugins

        load_general_plugins()
    yield


@pytest.fixture
def gpu() -> Iterator[Any]:
    """The pretended GPU; a test may give it another compute capability."""
    yield Gpu
    Gpu.capability = (9, 0)

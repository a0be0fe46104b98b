# SPDX-License-Identifier: Apache-2.0
"""Shared set-up of the tests."""

import os
from collections.abc import Iterator

import pytest
from hypothesis import settings

# The same examples on every run; no deadline, because machines share their cores.
settings.register_profile("polykv", derandomize=True, deadline=None, max_examples=60)
settings.load_profile("polykv")


def pytest_configure(config: pytest.Config) -> None:
    """Give each of pytest-xdist's workers, and its engines, a CPU of their own.

    By itself vLLM binds every engine on a small machine to the same one.
    """
    worker = os.environ.get("PYTEST_XDIST_WORKER")
    if worker is not None:
        cpus = sorted(os.sched_getaffinity(0))
        cpu = cpus[int(worker.removeprefix("gw")) % len(cpus)]
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", str(cpu))
        os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave out grids' cases of formats with head sizes that they do not have."""

    def exists(item: pytest.Item) -> bool:
        params = getattr(getattr(item, "callspec", None), "params", {})
        fmt, head_dim = params.get("fmt"), params.get("head_dim")
        return head_dim is None or head_dim in getattr(fmt, "head_dims", (head_dim,))

    items[:] = [item for item in items if exists(item)]


@pytest.fixture(autouse=True)
def _seed() -> None:
    """Seed torch, so that a test's numbers do not depend on the tests before it."""
    import torch

    torch.manual_seed(0)


@pytest.fixture
def one_torch_thread() -> Iterator[None]:
    """Keep torch from waking threads for its many small tensors."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)

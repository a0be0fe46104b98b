# SPDX-License-Identifier: Apache-2.0
"""What the launches hand over compiles: their real arguments, up to the launch itself.

Triton asks its driver for the device; here one answers that only knows its target, and
the launches stop after compiling.
"""

import pytest
import torch

triton = pytest.importorskip("triton", reason="Triton is not installed")


class Target:
    """A driver that knows what to compile for, and nothing else."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return device

    def get_current_target(self):  # type: ignore[no-untyped-def]
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 80, 32)


@pytest.mark.slow
def test_every_launch_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """A window of 1 and one token: Triton makes constants of arguments that are 1."""
    from triton.runtime.jit import JITFunction

    from polykv_vllm.formats import FORMATS
    from polykv_vllm.kernels.triton import launch
    from polykv_vllm.kernels.triton.config import device_config
    from polykv_vllm.kernels.triton.plan import build_plan
    from polykv_vllm.keys import KeyTransform

    compiled: list[str] = []

    def launched(self, grid):  # type: ignore[no-untyped-def]
        def run(*args, **options):  # type: ignore[no-untyped-def]
            kernel = self.run(*args, grid=grid, warmup=True, **options)
            assert kernel.asm["cubin"]
            compiled.append(self.fn.__name__)

        return run

    if not isinstance(launch.store_kernel, JITFunction):
        pytest.skip("Triton interprets in this process")
    monkeypatch.setattr(triton.runtime.driver, "_active", Target())
    monkeypatch.setattr(JITFunction, "__getitem__", launched)
    monkeypatch.setattr(launch, "_device_of", lambda tensor: (device_config(80), 4))
    fmt = FORMATS["polykv_k8v8"]
    cache = torch.zeros(2, 1, 16, fmt.slot_bytes(64), dtype=torch.uint8)
    rows = torch.randn(1, 1, 64).bfloat16()
    transform = KeyTransform(torch.ones(1, 64), True)
    store = launch.LayerStore(fmt, 0, transform)
    store(rows, rows, cache, torch.zeros(1, dtype=torch.int64))
    plan = build_plan(
        torch.ones(1, 1, dtype=torch.int32),
        torch.tensor([1], dtype=torch.int32),
        torch.tensor([0, 1], dtype=torch.int32),
        1,
        16,
        1,
    )
    attend = launch.LayerAttention(fmt, 0.125, 1, False, 0, transform)
    attend.run(rows, cache, torch.empty_like(rows), plan)
    assert compiled == [
        "store_kernel",
        "prepare_kernel",
        "attend_kernel",
        "finish_kernel",
    ]

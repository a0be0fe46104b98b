# SPDX-License-Identifier: Apache-2.0
"""Block sizes by architecture, format and head size, and what can run where.

The table is meant to be filled by `benchmarks/gpu.py`, once, on real hardware, not at
serve time. What it holds now was chosen by the compiler's resource report alone: no
spills, and two programs or more to a multiprocessor (docs/gpu.md).
"""

from dataclasses import dataclass

from polykv_vllm.formats import FormatSpec

MIN_CAPABILITY = 80
"""Triton 3.9 makes no matrix instruction for sm_75, int8 or fp16: attention compiles to
scalar multiply-adds there and spills its registers (docs/gpu.md)."""
INT8_CAPABILITY = 80

LARGE_ROWS = 32
"""Query rows of an item with many readers, or of a chunk of a prefill."""


@dataclass(frozen=True)
class LaunchConfig:
    """How a kernel is launched.

    Attributes:
        num_warps: Warps of a program.
        num_stages: Tiles in flight (software pipelining).

    """

    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class DeviceConfig:
    """What the kernels use on one architecture.

    Attributes:
        capability: 10 * major + minor; 0 for the interpreter.
        int8: Whether matrix products take int8 operands.
        assembly: Whether inline PTX is used.

    """

    capability: int
    int8: bool
    assembly: bool

    @property
    def interpreted(self) -> bool:
        """Whether this is Triton's interpreter on a CPU."""
        return self.capability == 0


INTERPRETER = DeviceConfig(0, True, False)


def capability_reason(capability: int) -> str | None:
    """Return why an architecture (10 * major + minor) is not served, if it is not."""
    if capability >= MIN_CAPABILITY:
        return None
    return (
        f"compute capability {capability // 10}.{capability % 10} is not "
        "supported: Triton has no matrix instructions for it. polykv's GPU kernels "
        "need 8.0 (Ampere) or later"
    )


def device_config(capability: int) -> DeviceConfig:
    """Return what an architecture uses.

    Args:
        capability: 10 * major + minor.

    Raises:
        NotImplementedError: It is older than the kernels support.

    """
    if reason := capability_reason(capability):
        raise NotImplementedError(reason)
    return DeviceConfig(capability, capability >= INT8_CAPABILITY, True)


def small_rows(group: int) -> int:
    """Return the query rows of a decode item: a power of two, at least 8."""
    return max(8, 1 << (group - 1).bit_length())


# (rows, head_dim) -> launch; per architecture or format only where they differ. One
# warp for 16 rows of the matrix instruction: Triton would have further warps repeat it.
_ATTEND: dict[tuple[int, int], LaunchConfig] = {
    (8, 64): LaunchConfig(1, 3),
    (8, 128): LaunchConfig(1, 3),
    (8, 256): LaunchConfig(2, 2),
    (16, 64): LaunchConfig(1, 3),
    (16, 128): LaunchConfig(1, 3),
    (16, 256): LaunchConfig(2, 2),
    (32, 64): LaunchConfig(2, 3),
    (32, 128): LaunchConfig(2, 2),
    (32, 256): LaunchConfig(4, 2),
}
_EXCEPTIONS: dict[tuple[int, str, int, int], LaunchConfig] = {}


def attend_config(
    device: DeviceConfig, fmt: FormatSpec, head_dim: int, rows: int
) -> LaunchConfig:
    """Return how `attend_kernel` is launched."""
    key = (rows, head_dim)
    return _EXCEPTIONS.get((device.capability, fmt.name, *key), _ATTEND[key])


def store_tokens(head_dim: int) -> int:
    """Return the tokens of one program of the store."""
    return {64: 16, 128: 8}.get(head_dim, 4)

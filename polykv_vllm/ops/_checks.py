# SPDX-License-Identifier: Apache-2.0
"""Checks that the descriptions of a batch have in common."""

import torch


def check_index(
    name: str,
    index: torch.Tensor,
    dtype: torch.dtype,
    dims: int,
    device: str = "cpu",
) -> None:
    """Check a tensor of indices that the kernels are to read.

    Raises:
        ValueError: It has another dtype, device, number of dimensions or stride.

    """
    if index.dtype != dtype or index.device.type != device or index.dim() != dims:
        where = "the CPU" if device == "cpu" else device
        raise ValueError(
            f"{name} must be {dtype} on {where} with {dims} dimension(s), not "
            f"{index.dtype} on {index.device} with shape {list(index.shape)}"
        )
    if index.numel() and index.stride(-1) != 1:
        raise ValueError(
            f"the last dimension of {name} must be contiguous, not {index.stride()}"
        )

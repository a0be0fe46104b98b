# SPDX-License-Identifier: Apache-2.0
"""Notices that a model's weights were exchanged while it serves.

Blocks are named by the digest of the files that were loaded. Weights that a trainer
puts in their place are in no file, so from then on nothing may be stored or read.
"""

from collections.abc import Sequence

import torch

_MAX_TENSORS = 32
_NUM_ELEMENTS = 16


class WeightWatch:
    """Compares a few elements of tensors all over a model with what they were.

    Args:
        models: Whose parameters are watched.

    """

    def __init__(self, models: Sequence[torch.nn.Module]) -> None:
        parameters = [p for model in models for p in model.parameters()]
        stride = -(-len(parameters) // _MAX_TENSORS) or 1
        self._modules = list(models)
        self._stride = stride
        self._first = self._sample()

    def has_changed(self) -> bool:
        """Whether the weights are others than at first; takes some 0.1 ms."""
        return self._sample() != self._first

    def _sample(self) -> bytes:
        # Asked anew each time: a reload may replace the tensors themselves.
        every = [p for model in self._modules for p in model.parameters()]
        return b"".join(_first_bytes(p) for p in every[:: self._stride])


def _first_bytes(parameter: torch.Tensor) -> bytes:
    row = parameter.detach()
    while row.dim() > 1:
        row = row[0]
    some = row.reshape(-1)[:_NUM_ELEMENTS].contiguous().cpu()
    return some.view(torch.uint8).numpy().tobytes()

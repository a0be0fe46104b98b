# SPDX-License-Identifier: Apache-2.0
"""Hypothesis strategies for rows of extreme norm and shape."""

import torch
from hypothesis import strategies as st

KINDS = (
    "zeros",
    "gaussian",
    "one_hot",
    "constant",
    "spike",
    "alternating",
    "tiny_beside_large",
)

# 1e-41 and 3e-39 are subnormal in fp32; 3.3895e38 is bf16's largest, below fp32's.
MAGNITUDES = (1e-41, 3e-39, 1e-30, 1e-5, 1.0, 65504.0, 1e5, 1e30, 3.3895e38)

POISONS = (float("inf"), float("-inf"), float("nan"))


def make_row(kind: str, magnitude: float, head_dim: int, seed: int) -> torch.Tensor:
    """Return `[head_dim]` fp32 with largest magnitude `magnitude` (or zeros)."""
    generator = torch.Generator().manual_seed(seed)
    unit = torch.randn(head_dim, generator=generator)
    unit /= unit.abs().max()
    hot = seed % head_dim
    if kind == "zeros":
        unit.zero_()
    elif kind == "one_hot":
        unit.zero_()
        unit[hot] = -1.0 if seed % 2 else 1.0
    elif kind == "constant":
        unit.fill_(-1.0 if seed % 2 else 1.0)
    elif kind == "spike":
        unit *= 1e-3
        unit[hot] = 1.0
    elif kind == "alternating":
        unit[0::2], unit[1::2] = 1.0, -1.0
    elif kind == "tiny_beside_large":
        unit *= 1e-20
        unit[hot] = -1.0
    # In fp64: 1e-41 is below what fp32 multiplies without flushing on some machines.
    return (unit.double() * magnitude).float()


def rows(head_dim: int) -> st.SearchStrategy[torch.Tensor]:
    """Finite rows `[head_dim]` fp32."""
    return st.builds(
        make_row,
        st.sampled_from(KINDS),
        st.sampled_from(MAGNITUDES),
        st.just(head_dim),
        st.integers(0, 2**20),
    )


@st.composite
def maybe_poisoned(draw: st.DrawFn, head_dim: int) -> torch.Tensor:
    """Rows of which some hold an inf or a NaN."""
    row = draw(rows(head_dim))
    if draw(st.integers(0, 3)) == 0:
        row[draw(st.integers(0, head_dim - 1))] = draw(st.sampled_from(POISONS))
    return row

# SPDX-License-Identifier: Apache-2.0
"""Frozen tiles, one per format and version: `python -m tests.golden.regenerate`.

Run it only when a format's bytes change on purpose, and raise the format's version:
an existing file is never overwritten. The inputs are integers over 256, made without
a random generator, so every dtype holds them and every torch makes the same.
"""

from pathlib import Path

import torch

from polykv_vllm.formats import FORMATS, FormatSpec
from polykv_vllm.formats.layout import LAYOUT_ID

HEAD_DIM, BLOCK_SIZE = 64, 16


def path(fmt: FormatSpec) -> Path:
    """Return the file of a format's frozen tile."""
    return Path(__file__).parent / f"{fmt.name}-{fmt.version}-{LAYOUT_ID}.bin"


def rows(seed: int) -> torch.Tensor:
    """Return `[BLOCK_SIZE, 1, HEAD_DIM]` fp32 of 8-bit numbers; token 3 is zero."""
    out, state = [], seed
    for token in range(BLOCK_SIZE):
        for _ in range(HEAD_DIM):
            state = (state * 1103515245 + 12345) % 2**31
            number = (state >> 16) % 255 - 127
            out.append(number * 2.0 ** (token % 5 - 8) if token != 3 else 0.0)
    return torch.tensor(out).view(BLOCK_SIZE, 1, HEAD_DIM)


def tile(fmt: FormatSpec, isa: str) -> bytes:
    """Store the rows and return the tile's bytes."""
    from polykv_vllm import ops

    shape = (1, 1, BLOCK_SIZE, fmt.slot_bytes(HEAD_DIM))
    cache = torch.zeros(shape, dtype=torch.uint8)
    slots = torch.arange(BLOCK_SIZE)
    ops.reshape_and_cache(rows(1), rows(2), cache, slots, fmt, isa=isa)
    return cache.numpy().tobytes()


def main() -> None:
    """Write the files that do not exist yet."""
    for fmt in FORMATS.values():
        if not path(fmt).exists():
            path(fmt).write_bytes(tile(fmt, "reference"))
            print(f"wrote {path(fmt).name}")


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
"""The capability table: (op, device, isa) -> what makes the op for one layer.

Every implementation listed takes every format and head dimension of `formats/`, and
checks them itself.
"""

from collections.abc import Callable, Sequence
from typing import Any

OPS = ("reshape_and_cache", "paged_attention")

Entry = Callable[..., Any]


class OpTable:
    """Implementations by (op, device type, isa)."""

    def __init__(self) -> None:
        self._entries: dict[tuple[str, str, str], Entry] = {}

    def register(self, op: str, device: str, isa: str, entry: Entry) -> None:
        """Add an implementation.

        Raises:
            ValueError: The op is unknown, or the place is taken.

        """
        key = (op, device, isa)
        if op not in OPS:
            raise ValueError(f"unknown op {op!r}; ops: {', '.join(OPS)}")
        if key in self._entries:
            raise ValueError(f"{op} is already registered for {device}/{isa}")
        self._entries[key] = entry

    def isas(self, device: str) -> tuple[str, ...]:
        """Instruction sets registered for `device`, in order of registration."""
        return tuple(dict.fromkeys(i for _, d, i in self._entries if d == device))

    def require(self, op: str, device: str, isa: str, case: str = "") -> Entry:
        """Return the implementation; `case` says in the error what it was wanted for.

        Raises:
            NotImplementedError: There is none; the message lists what exists.

        """
        entry = self._entries.get((op, device, isa))
        if entry is None:
            known = ", ".join(f"{d}/{i}" for o, d, i in self._entries if o == op)
            raise NotImplementedError(
                f"polykv has no {op}{case} for device {device!r} with isa {isa!r}; "
                f"available: {known or 'none'}"
            )
        return entry


def validate_cache(
    shape: Sequence[int], strides: Sequence[int], dtype: Any, slot_bytes: int
) -> None:
    """Check shape, strides (elements) and dtype of a cache tensor.

    It must be `[num_blocks, num_kv_heads, block_size, slot_bytes]` uint8 with the last
    two dimensions contiguous; `slot_bytes` is what the format needs per (token, KV
    head).

    Raises:
        ValueError: It is not such a tensor.

    """
    if str(dtype) != "torch.uint8" or len(shape) != 4:
        raise ValueError(
            "kv_cache must be uint8 [num_blocks, num_kv_heads, block_size, "
            f"slot_bytes], not {dtype} {list(shape)}"
        )
    if shape[3] != slot_bytes:
        raise ValueError(
            f"kv_cache has {shape[3]} bytes per (token, KV head); the format needs "
            f"{slot_bytes}"
        )
    if strides[3] != 1 or strides[2] != slot_bytes:
        raise ValueError("the tile of one (block, KV head) must be contiguous")

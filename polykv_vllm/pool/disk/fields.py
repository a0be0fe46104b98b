# SPDX-License-Identifier: Apache-2.0
"""One digest for several named values, so that no two lists of them look alike.

Each value is written as a type, the length of its bytes, and the bytes; a container as
the number of its members, then the members. So ("ab", "c") and ("a", "bc") differ, and
so do the number 1, the text "1" and True.
"""

import hashlib
import struct
from collections.abc import Mapping, Sequence
from typing import TypeAlias

Value: TypeAlias = (
    bool | int | float | str | bytes | Sequence["Value"] | Mapping[str, "Value"] | None
)


def digest(kind: str, fields: Mapping[str, Value]) -> bytes:
    """Return the sha256 of named values.

    Args:
        kind: What is described; digests of two kinds never meet.
        fields: Values by name; their order does not matter.

    Raises:
        TypeError: A value is of a type that has no encoding.

    """
    return hashlib.sha256(encode(kind) + encode(fields)).digest()


def encode(value: Value) -> bytes:
    """Return the bytes of one value, which no other value has."""
    if isinstance(value, Mapping):
        pairs = sorted(value.items())
        members = [encode(part) for pair in pairs for part in pair]
        return _tagged(b"m", len(pairs), b"".join(members))
    if isinstance(value, (list, tuple)):
        return _tagged(b"l", len(value), b"".join(map(encode, value)))
    tag, body = _scalar(value)
    return _tagged(tag, len(body), body)


def _scalar(value: Value) -> tuple[bytes, bytes]:
    if value is None:
        return b"n", b""
    if isinstance(value, bool):  # before int, which it is, too
        return b"?", bytes([value])
    if isinstance(value, int):
        return b"i", str(value).encode()
    if isinstance(value, float):
        return b"f", struct.pack("<d", value)
    if isinstance(value, str):
        return b"s", value.encode()
    if isinstance(value, bytes):
        return b"b", value
    raise TypeError(f"{type(value).__name__} has no encoding: {value!r}")


def _tagged(tag: bytes, length: int, body: bytes) -> bytes:
    return tag + struct.pack("<Q", length) + body

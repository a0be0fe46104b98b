# SPDX-License-Identifier: Apache-2.0
"""The file of one block of one rank.

    offset  bytes
         0      8  MAGIC, the last byte is the version
         8      8  number of payload bytes, little endian
        16     32  identity of the rank
        48     32  name of the content
        80     32  BLAKE3 of bytes 8 to 79 and the payload
       112     16  zeros
       128         payload: the tiles of all layers, in their order

A file has its name only when it is whole, as far as this machine's kernel knows; what
a power failure leaves of it fails the checksum. It is checked before a byte is used.
"""

import contextlib
import itertools
import os
import stat
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Final, TypeAlias

from blake3 import blake3

Buffer: TypeAlias = "bytes | bytearray | memoryview"

MAGIC: Final = b"polykvB\x01"
HEADER_BYTES: Final = 128
_HEADER: Final = struct.Struct("<8sQ32s32s32s16x")
_counter = itertools.count()


class DamagedError(Exception):
    """A file is not what its name says; the message says in what way."""


def write_block(
    path: Path, identity: bytes, name: bytes, payload: Sequence[Buffer]
) -> None:
    """Write a file that appears under its name whole or not at all.

    Args:
        path: In a directory that exists.
        identity: 32 bytes.
        name: 32 bytes.
        payload: Parts, written one after the other.

    Raises:
        OSError: There is no room, or no permission; nothing is left behind.

    """
    num_bytes = sum(memoryview(part).nbytes for part in payload)
    checksum = _checksum(num_bytes, identity, name, payload)
    header = _HEADER.pack(MAGIC, num_bytes, identity, name, checksum)
    unfinished = path.parent / f".{os.getpid()}-{next(_counter)}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(unfinished, flags, 0o600)
    try:
        with os.fdopen(descriptor, "wb", buffering=0) as file:
            for part in (header, *payload):
                _write_all(file.fileno(), part)
        os.rename(unfinished, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(unfinished)
        raise


def read_block(path: Path, identity: bytes, name: bytes, payload: memoryview) -> None:
    """Fill a buffer with a file's payload.

    Args:
        path: The file.
        identity: 32 bytes that it must have.
        name: 32 bytes that it must have.
        payload: As many bytes as it must have; undefined if this raises.

    Raises:
        FileNotFoundError: There is no such file.
        DamagedError: It is not the file asked for, or a byte of it has changed.
        OSError: It cannot be read.

    """
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    descriptor = os.open(path, flags)
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise DamagedError("not a regular file")
        if found.st_size != HEADER_BYTES + payload.nbytes:
            raise DamagedError(
                f"{found.st_size} bytes, expected {HEADER_BYTES + payload.nbytes}"
            )
        header = bytearray(HEADER_BYTES)
        if os.readv(descriptor, [header]) != HEADER_BYTES:
            raise DamagedError("shortened while it was read")
        _read_all(descriptor, payload)
    finally:
        os.close(descriptor)
    magic, num_bytes, of_rank, of_content, checksum = _HEADER.unpack(header)
    if magic != MAGIC or num_bytes != payload.nbytes:
        raise DamagedError("not a block file of this version")
    if of_rank != identity or of_content != name:
        raise DamagedError("the block of another rank or content")
    if checksum != _checksum(num_bytes, identity, name, [payload]):
        raise DamagedError("the checksum does not match")


def _checksum(
    num_bytes: int, identity: bytes, name: bytes, payload: Sequence[Buffer]
) -> bytes:
    hasher = blake3(struct.pack("<Q32s32s", num_bytes, identity, name))
    for part in payload:
        hasher.update(part)
    return hasher.digest()


def _write_all(descriptor: int, part: Buffer) -> None:
    rest = memoryview(part).cast("B")
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def _read_all(descriptor: int, buffer: memoryview) -> None:
    rest = buffer.cast("B")
    while rest:
        count = os.readv(descriptor, [rest])
        if count == 0:
            raise DamagedError("shortened while it was read")
        rest = rest[count:]

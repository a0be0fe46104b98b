# SPDX-License-Identifier: Apache-2.0
"""The directory of a pool: who may use it, and what lies where.

    DIR/polykv-pool                    one line: the version of what is below
    DIR/ranks/<identity>/identity.json what the blocks of this rank mean
    DIR/ranks/<identity>/lock          held by the one process that writes here
    DIR/ranks/<identity>/<xx>/<name>   a block; xx are the first digits of its name
    DIR/ranks/<identity>/names/*.json  named prefixes (names.py)

All names are made of hexadecimal digits by this package; what is called otherwise is
left alone. A lock is dropped by the kernel with its process, so none is ever stale.
"""

import fcntl
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from polykv_vllm.pool.disk.identity import STORE_VERSION, RankIdentity, load_identity

MARKER = "polykv-pool"
RANKS = "ranks"
LOCK = "lock"
NAMES = "names"
_MARKER_TEXT = f"polykv-vllm pool, version {STORE_VERSION}\n"
_NAME = re.compile(r"[0-9a-f]{64}")
_SHELF = re.compile(r"[0-9a-f]{2}")
_UNFINISHED = re.compile(r"\.\d+-\d+")


class PoolDirectoryError(Exception):
    """A directory cannot serve as a pool; the message says why and what could."""


@dataclass(frozen=True)
class FoundBlock:
    """A file that has a block's name.

    Attributes:
        name: The content.
        size: In bytes.
        mtime_ns: When it was last used.

    """

    name: bytes
    size: int
    mtime_ns: int


def prepare_directory(path: Path) -> None:
    """Make a pool's directory, or check the one that is there.

    Raises:
        PoolDirectoryError: It holds something else, or others may write to it.
        OSError: It cannot be made.

    """
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = path.stat()
    if found.st_uid != os.getuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PoolDirectoryError(
            f"{path} can be written by others than user {os.getuid()}, who would then "
            "choose what this server reads; give it a directory of its own (mode 700)"
        )
    marker = path / MARKER
    others = [p for p in path.iterdir() if not p.name.startswith(f".{MARKER}")]
    if not others:  # several workers may do this at once, all the same
        unfinished = path / f".{MARKER}-{os.getpid()}"
        unfinished.write_text(_MARKER_TEXT)
        unfinished.rename(marker)
    elif not marker.exists():
        raise PoolDirectoryError(
            f"{path} is not empty and is not a pool; name a new directory"
        )
    text = marker.read_text()
    if text != _MARKER_TEXT:
        raise PoolDirectoryError(
            f"{marker} says {text.strip()[:80]!r}; this version of polykv-vllm reads "
            f"{_MARKER_TEXT.strip()!r}: name a new directory"
        )
    (path / RANKS).mkdir(mode=0o700, exist_ok=True)


def rank_directory(path: Path, identity: RankIdentity) -> Path:
    """Return where the blocks of a rank lie."""
    return path / RANKS / identity.directory


def block_path(rank: Path, name: bytes) -> Path:
    """Return where a block of a rank lies."""
    digits = name.hex()
    return rank / digits[:2] / digits


def lock_for_writing(rank: Path) -> int | None:
    """Return a descriptor that holds a rank's lock; None: another process has it.

    Raises:
        OSError: The lock cannot be made.

    """
    descriptor = os.open(rank / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


def find_blocks(rank: Path) -> list[FoundBlock]:
    """Return the blocks of a rank, the one longest unused first; reads no block."""
    found = []
    for entry in _entries(rank):
        if _NAME.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
            state = entry.stat(follow_symlinks=False)
            name = bytes.fromhex(entry.name)
            found.append(FoundBlock(name, state.st_size, state.st_mtime_ns))
    return sorted(found, key=lambda block: block.mtime_ns)


def remove_unfinished(rank: Path) -> int:
    """Delete what writers that were killed have left; returns how many files."""
    left = [e for e in _entries(rank) if _UNFINISHED.fullmatch(e.name)]
    for entry in left:
        os.unlink(entry.path)
    return len(left)


def other_ranks(path: Path, identity: RankIdentity) -> dict[Path, RankIdentity]:
    """Return the directories of other identities, and what they say of themselves."""
    found = {}
    with os.scandir(path / RANKS) as entries:
        for entry in entries:
            if entry.name == identity.directory or not _NAME.fullmatch(entry.name):
                continue
            if (other := load_identity(Path(entry.path))) is not None:
                found[Path(entry.path)] = other
    return found


def _entries(rank: Path) -> Iterator[os.DirEntry[str]]:
    """Yield what lies on a rank's shelves."""
    with os.scandir(rank) as shelves:
        names = [s.path for s in shelves if _SHELF.fullmatch(s.name) and s.is_dir()]
    for name in names:
        with os.scandir(name) as entries:
            yield from entries
